"""A decoder layer whose norm and router are one launch: the same bits as two, where it is used, and what says so."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.configs import small_k3, small_linear

from anabranch.config.hf import parse_model_config
from anabranch.config.model import ModelConfig
from anabranch.config.parallel import ParallelConfig
from anabranch.fusion import counters
from anabranch.layers.batch import Batch
from anabranch.layers.residual import Stream
from anabranch.measure.touched import noting_experts
from anabranch.models.kimi import DecoderLayer, KimiForCausalLM
from anabranch.ops import implementation, native, registry
from anabranch.ops.registry import select
from anabranch.ops.router.plan import NORMED_TOKENS
from anabranch.ops.router.reference import norm_route
from anabranch.ops.segments import Segments

CUDA = torch.device("cuda")


def batch(rows: int) -> Batch:
    segments = Segments.of([rows])
    return Batch(
        tokens=torch.zeros(rows, dtype=torch.int64),
        segments=segments,
        prefill=segments,
        decodes=0,
        slots=torch.zeros(1, dtype=torch.int64),
        block_table=torch.zeros(1, 1, dtype=torch.int64),
        rows=torch.arange(rows),
        wanted=torch.arange(rows),
    )


def layer(index: int) -> DecoderLayer:
    torch.manual_seed(0)
    made = KimiForCausalLM(parse_model_config(small_linear()), dtype=torch.bfloat16).model.layers[str(index)]
    assert isinstance(made, DecoderLayer)
    for p in made.parameters():
        p.copy_(torch.randn(p.shape) * 0.2)
    return made


@pytest.fixture
def one_launch(monkeypatch) -> DecoderLayer:
    made = layer(1)
    gate: Any = made.get_submodule("block_sparse_moe.gate")
    assert gate.ops.norm_route is None
    monkeypatch.setattr(gate, "ops", replace(gate.ops, norm_route=norm_route))
    return made


@pytest.mark.parametrize("pending", [True, False])
@pytest.mark.parametrize("rows", [1, NORMED_TOKENS, NORMED_TOKENS + 1])
def test_a_few_rows_are_normed_and_routed_at_once(one_launch, rows, pending):
    prefix, update = torch.randn(2, rows, 64).bfloat16()
    streams = [Stream(prefix.clone(), pending=update if pending else None) for _ in range(2)]
    want = layer(1).feed(streams[0], batch(rows))
    with counters.counting() as counted:
        got = one_launch.feed(streams[1], batch(rows))
    assert torch.equal(got, want)
    assert streams[1].pending is None
    assert torch.equal(streams[1].sum, streams[0].sum)
    assert counted["moe.norm_route"] == (rows <= NORMED_TOKENS)


def test_who_watches_the_router_sees_every_choice(one_launch):
    with noting_experts(one_launch) as seen:
        for rows in (1, NORMED_TOKENS + 1):
            one_launch.feed(Stream(torch.randn(rows, 64).bfloat16()), batch(rows))
    gate: Any = one_launch.get_submodule("block_sparse_moe.gate")
    top_k = gate.moe.top_k
    assert list(seen.choices.values()) == [[top_k, top_k * (NORMED_TOKENS + 1)]]


def test_a_dense_ffn_keeps_its_norm():
    with counters.counting() as counted:
        layer(0).feed(Stream(torch.randn(1, 64).bfloat16()), batch(1))
    assert not counted["moe.norm_route"]


def chosen(config: ModelConfig, monkeypatch: pytest.MonkeyPatch, **options) -> tuple[str, str]:
    """The choice on a Hopper GPU with every library built."""
    monkeypatch.setattr(implementation, "_native", lambda folder, device: native.Verdict(True, folder))
    monkeypatch.setattr(implementation, "find_spec", lambda package: package)
    monkeypatch.setattr(registry, "_load", lambda *names: None)
    return select(config, CUDA, **options).chosen["norm_route"]


def test_the_selection_says_why(real_kl, real_k3, monkeypatch):
    assert chosen(real_kl, monkeypatch) == ("cuda", "first that fits")
    assert chosen(real_k3, monkeypatch)[1].endswith("cuda: attention residuals are read through a norm of their own")
    replicas = chosen(real_kl, monkeypatch, replicas=4)
    assert replicas[0] == "chain"
    assert replicas[1].endswith("cuda: cannot be where the rows of attention replicas join, there are 4")
    for options, why in (({"deterministic": True}, "not batch-invariant"), ({"dtype": torch.float32}, "float32")):
        assert why in chosen(real_kl, monkeypatch, **options)[1]
    with pytest.raises(ValueError, match="op norm_route=cuda cannot be honoured: cannot be where the rows"):
        chosen(real_kl, monkeypatch, replicas=2, wishes={"norm_route": "cuda"})


def test_a_model_of_replicas_asks_for_them(monkeypatch):
    asked = []
    monkeypatch.setattr("anabranch.models.kimi.select", lambda *a, **o: asked.append(o["replicas"]) or select(*a, **o))
    KimiForCausalLM(parse_model_config(small_k3()), parallel=ParallelConfig(tp_size=2), device="meta")
    plain = ParallelConfig(tp_size=2, attn_tp_size=2)
    KimiForCausalLM(parse_model_config(small_linear()), parallel=plain, device="meta")
    assert asked == [2, 1]

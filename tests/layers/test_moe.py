"""The mixture-of-experts FFN as a layer: its two ways of running, and what the ranks add up to."""

from dataclasses import replace

import pytest
import torch
from helpers.configs import small_k3, small_linear

from anabranch.config.hf import parse_model_config
from anabranch.config.parallel import ParallelConfig
from anabranch.layers.batch import Batch
from anabranch.layers.moe import MoeFfn
from anabranch.models.kimi import KimiForCausalLM
from anabranch.ops.expert_ffn.reference import expert_ffn
from anabranch.ops.segments import Segments

BATCH = Batch(
    tokens=torch.zeros(5, dtype=torch.int64),
    segments=Segments.of([5]),
    prefill=Segments.of([5]),
    decodes=0,
    slots=torch.zeros(1, dtype=torch.int64),
    block_table=torch.zeros(1, 1, dtype=torch.int64),
    rows=torch.arange(5),
    wanted=torch.arange(5),
)
CONFIGS = {
    "kl": small_linear(),
    "kl without shared experts": small_linear(num_shared_experts=0),
    "k3": small_k3(),
}


def layer(raw: dict, **options) -> MoeFfn:
    """The FFN of layer 1 with small random weights and every MXFP4 code."""
    torch.manual_seed(0)
    model = KimiForCausalLM(parse_model_config(raw), dtype=torch.bfloat16, **options)
    ffn = model.model.layers["1"].block_sparse_moe
    for name, p in ffn.named_parameters():
        if p.dtype == torch.uint8:
            p.copy_(torch.randint(118, 124, p.shape) if "scale" in name else torch.randint(0, 256, p.shape))
        else:
            p.copy_(torch.randn(p.shape) * 0.2)
    return ffn


@pytest.mark.parametrize("name", CONFIGS)
def test_the_common_launches_take_the_place_of_the_chain(monkeypatch, name):
    ffn, calls = layer(CONFIGS[name]), []
    x = torch.randn(5, 64).bfloat16()
    assert ffn.ops.expert_ffn is None
    want = ffn(x, BATCH)

    def recorded(*inputs, **options):
        calls.append(options)
        return expert_ffn(*inputs, **options)

    monkeypatch.setattr(ffn, "ops", replace(ffn.ops, expert_ffn=recorded))
    assert torch.equal(ffn(x, BATCH), want)
    assert len(calls) == 1
    assert (calls[0]["latent"] is None) == (name != "k3")


def test_what_the_ranks_add_up_to_is_the_whole():
    seen = []

    class Comm:
        def gather_rows(self, x, counts):
            return x

        def sum_rows(self, x, counts):
            seen.append(x.clone())
            return x * 2

    ffn, x = layer(small_linear(), parallel=ParallelConfig(tp_size=2), comm=Comm()), torch.randn(5, 64).bfloat16()
    assert torch.equal(ffn(x, BATCH), seen[0] * 2)
    assert len(seen) == 1


@pytest.mark.parametrize("name", ["kl", "k3"])
def test_a_rank_of_whole_experts_knows_how_many_there_are(name):
    place = ParallelConfig(tp_size=2, tp_rank=1, ep_size=2, ep_rank=1)
    whole, part = layer(CONFIGS[name]).experts, layer(CONFIGS[name], parallel=place).experts
    assert (whole.first, whole.count, whole.total) == (0, part.total, part.total)
    assert (part.first, 2 * part.count) == (part.count, part.total)

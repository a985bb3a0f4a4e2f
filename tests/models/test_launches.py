"""What a decode step runs: operations in the order of the model and, between them, no tensor work that is a launch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.oracle import Session, engine_model
from helpers.ref_tiny import kimi_k3_tiny, kimi_linear_tiny, random_weights
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from anabranch.layers.batch import KdaState, LatentPages
from anabranch.layers.mlp import DenseFfn
from anabranch.layers.moe import MoeFfn
from anabranch.layers.residual import Stream
from anabranch.models import kimi
from anabranch.ops.kda_step.reference import kda_step
from anabranch.ops.mla.reference import mla_step
from anabranch.ops.registry import OP_NAMES, select

TINY = {"kl": kimi_linear_tiny(layers=4, kda_layers=(1, 2, 3), full_layers=(4,)), "k3": kimi_k3_tiny()}
VIEWS = {"view", "_unsafe_view", "split_with_sizes", "slice", "select", "transpose", "permute", "unsqueeze", "squeeze"}
VIEWS |= {"t", "expand", "detach", "alias", "unbind", "split", "as_strided", "lift_fresh", "unflatten"}


class Between(TorchDispatchMode):
    """Notes every tensor operation that is not a view."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        if name not in VIEWS:
            self.seen.append(f"aten {name}")
        return function(*args, **(kwargs or {}))


def noted(name: str, op: Callable, seen: list[str]) -> Callable:
    """One event, whatever it does inside."""

    def call(*args: Any, **options: Any) -> Any:
        seen.append(name)
        before = len(seen)
        with _disable_current_modes():
            result = op(*args, **options)
        del seen[before:]
        return result

    return call


@pytest.fixture(params=TINY)
def step(request, monkeypatch) -> list[str]:
    """The launches of one decode step of two requests behind their prompts."""
    seen: list[str] = []

    def select_noted(*args: Any, **options: Any) -> Any:
        chosen = select(*args, **options)
        ops = {name: getattr(chosen.ops, name) for name in OP_NAMES if getattr(chosen.ops, name) is not None}
        ops |= {"kda_step": kda_step, "mla_step": mla_step}
        return replace(chosen, ops=replace(chosen.ops, **{name: noted(name, ops[name], seen) for name in ops}))

    monkeypatch.setattr(kimi, "select", select_noted)
    for ffn in (DenseFfn, MoeFfn):
        monkeypatch.setattr(ffn, "forward", noted("ffn", ffn.forward, seen))
    session = Session(engine_model(TINY[request.param], random_weights(TINY[request.param], 1)))
    session.step((0, [1, 2, 3]), (1, [4, 5]))
    seen.clear()
    with Between(seen):
        session.step((0, [6]), (1, [7]), decodes=2)
    first, last = seen.index("aten embedding"), len(seen) - seen[::-1].index("linear")
    return seen[first:last]


def test_between_the_operations_of_a_decode_step_stands_no_launch(step):
    norms, layers = ("rms_norm", "add_rms_norm", "residual_norm"), step.count("ffn")
    # looked up: the last rows of the sum, of the update that it lacks and of every banked sum
    banked = 3 if "residual_norm" in step else 0
    between = [name for name in step if name.startswith("aten")]
    assert between == ["aten embedding"] + ["aten index"] * (2 + banked)
    assert step.count("kda_step") + step.count("mla_step") == layers
    assert "mla_write" not in step
    assert "mla_decode" not in step
    for i, name in enumerate(step):
        if name in ("kda_step", "mla_step"):
            assert step[i + 1] == "linear", "o_proj comes right behind"
            assert step[i + 2] in norms[1:], "and the sum in the norm behind it"
        if name == "ffn":
            assert step[i - 1] in norms
            assert step[i + 1] in (*norms[1:], "aten index")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", TINY)
def test_the_chain_has_the_bits_of_separate_adds_and_norms(case, dtype, monkeypatch):
    """A stream that never lets an update wait is the chain of plain operations."""

    def logits() -> torch.Tensor:
        session = Session(engine_model(TINY[case], random_weights(TINY[case], 1), dtype=dtype))
        session.cache.layers = [
            LatentPages(c.pages.to(dtype)) if isinstance(c, LatentPages) else KdaState(c.conv.to(dtype), c.state)
            for c in session.cache.layers
        ]
        parts = session.step((0, list(range(20))), (1, [4, 5])) + session.step((0, [6]), (1, [7]), decodes=2)
        return torch.cat(parts)

    def add(self: Stream, update: torch.Tensor) -> None:
        self.prefix = update if self.prefix is None else self.prefix + update

    chained = logits()
    monkeypatch.setattr(Stream, "add", add)
    assert chained.isfinite().all()
    assert torch.equal(logits(), chained)

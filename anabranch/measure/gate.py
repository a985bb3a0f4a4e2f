"""No speed-up on a red gate: a path must equal the separate one before its time means anything."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, cast

import torch

from anabranch.fusion.fork import Fork
from anabranch.fusion.prologue import EQUALITY, Path
from anabranch.layers.batch import Batch, KdaState
from anabranch.layers.kda import KdaLayer
from anabranch.layers.mla import MlaLayer
from anabranch.measure.subject import Decodes, Subject, force
from anabranch.ops.spec import Equality, tolerance

REPLAYS = 3
# behind the projections come two norms, a softmax and two more GEMMs
BLOCK_EQUALITY = tolerance(2e-5, 2e-2)


class GateRedError(Exception):
    """A path gives other values than the separate one; nothing may be timed."""


def take_all(outputs: Any) -> dict[str, torch.Tensor]:
    """Every tensor of a prologue's result, joined, by name."""
    values = {f.name: getattr(outputs, f.name) for f in fields(outputs)}
    arrived = {name: v.take() if isinstance(v, Fork) else v for name, v in values.items()}
    return {name: v for name, v in arrived.items() if v is not None}


def check_prologue(subject: Subject, layer: KdaLayer | MlaLayer, paths: Mapping[str, Path], rows: int) -> str:
    """Every path against `separate` at M = rows, eager and, on CUDA, replayed with new inputs; the class it is held to.

    Raises:
        GateRedError: the first difference, with its path, coordinate and both values.
    """
    weights = layer.prologue.weights
    for name, path in paths.items():
        _check(
            subject,
            f"{layer.prologue.kind} {name} at M={rows}",
            lambda x, path=path: take_all(path.run(weights, x).finished(weights)),
            lambda x: take_all(paths["separate"].run(weights, x)),
            rows,
            EQUALITY,
        )
    return EQUALITY.kind


def check_kda(subject: Subject, layer: KdaLayer, paths: Mapping[str, Path], decodes: Decodes, batch: Batch) -> str:
    """The same over the whole layer, decode step and output projection included: a decay may end in the step.

    Raises:
        GateRedError: as above.
    """
    cache = cast(KdaState, decodes.cache.layers[0])

    def block(name: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
        force([layer.prologue], paths[name])
        cache.state.fill_(0.01)  # every run starts from one state that a decay changes
        cache.conv.zero_()
        # the copy is a plain launch between what the pools were given and the step's early reads of it
        return {"output": layer(x.clone(), batch, cache)}

    for name in paths:
        one, other = lambda x, name=name: block(name, x), lambda x: block("separate", x)
        _check(subject, f"kda layer, {name} at M={batch.decodes}", one, other, batch.decodes, BLOCK_EQUALITY)
    return BLOCK_EQUALITY.kind


def check_mla(subject: Subject, layer: MlaLayer, paths: Mapping[str, Path], decodes: Decodes, batch: Batch) -> str:
    """The same over the whole layer, attention, gate and output projection included."""
    cache = decodes.cache.layers[-1]

    def block(name: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
        force([layer.prologue], paths[name])
        return {"output": layer(x, batch, cache)}

    for name in paths:
        what = f"mla {name} at M={batch.decodes}, context {batch.segments.totals[0]}"
        one, other = lambda x, name=name: block(name, x), lambda x: block("separate", x)
        _check(subject, what, one, other, batch.decodes, BLOCK_EQUALITY)
    return BLOCK_EQUALITY.kind


def _check(subject: Subject, what: str, run: Callable, separate: Callable, rows: int, rule: Equality) -> None:
    inputs = [subject.hidden(rows) for _ in range(REPLAYS)]
    _compare(run(inputs[0]), separate(inputs[0]), what, rule)
    if subject.device.type != "cuda":
        return
    x = inputs[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run(x)
    for fresh in inputs:
        x.copy_(fresh)
        for tensor in outputs.values():
            tensor.fill_(float("nan"))
        graph.replay()
        _compare(outputs, separate(fresh), f"{what}, replayed", rule)


def _compare(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], what: str, rule: Equality) -> None:
    if got.keys() != want.keys():
        raise GateRedError(f"{what}: gives {', '.join(got)}; separate gives {', '.join(want)}")
    for name, value in want.items():
        try:
            rule.check(got[name].contiguous(), value.contiguous(), f"{what}, {name}")
        except AssertionError as error:
            raise GateRedError(str(error)) from None

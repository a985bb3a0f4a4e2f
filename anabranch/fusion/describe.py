"""What a prologue would do, read off a dry run of its paths that skips the GEMMs: no row count is worked out twice."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

import torch

from anabranch.config.model import LayerKind, ModelConfig
from anabranch.fusion import counters
from anabranch.fusion.buffer import Fp8MergedWeight, MergedWeight
from anabranch.fusion.fork import Branch, Fork
from anabranch.fusion.kda_paths import kda_paths
from anabranch.fusion.mla_paths import mla_paths
from anabranch.fusion.plan import Choice
from anabranch.fusion.prologue import KdaInputs, KdaWeights, MlaInputs, MlaWeights, Path, Prologue
from anabranch.fusion.rules import FP8
from anabranch.ops.skinny_gemm.spec import ranks

# the names that papers and engines use; other combinations are spelled out
_NAMES = {
    "q+k+v": "QKV",
    "q+k+v+g": "QKVG",
    "f_a+b": "BFA",
    "f_a+g_a+b": "tail",
    "q_a+kv_a": "QKV-A",
    "q+kv_a": "QKV-A",
    "q+k+v+g+f_a+b": "whole",
    "q+k+v+f_a+g_a+b": "whole",
    "q_a+kv_a+g": "whole",
    "q+kv_a+g": "whole",
    "g+q_a+kv_a": "whole",
    "g+q+kv_a": "whole",
}
_TOKENS = 2  # with one row, strides say nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """`columns` consecutive columns of a GEMM result and who reads them: a prologue output, a later GEMM, or "pad"."""

    to: str
    columns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemm:
    """One launch: `batch` GEMMs of together `rows` weight rows, each over `depth` inputs; `parts` split the result.

    `side`: it runs on the side stream, beside main work (where the device has streams). `inside`: no launch of its
    own, it runs in that of the GEMM before it, or in the layer's decode step where it is deferred.
    """

    name: str
    rows: int
    depth: int
    batch: int
    parts: tuple[Part, ...]
    side: bool
    inside: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferReport:
    """One merged buffer: its row segments in order as (checkpoint name, rows), then `pad` zero rows.

    `bytes` are all that it holds, scales included.
    """

    segments: tuple[tuple[str, int], ...]
    pad: int
    rows: int
    depth: int
    format: str
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PathReport:
    """The verdict on one path and the GEMMs it launches, in order; a path that is refused has none."""

    path: str
    ok: bool
    reason: str
    gemms: tuple[Gemm, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrologueReport:
    """All paths of a layer kind over its buffers, the chosen one (several by measured times: "a or b"), and why."""

    kind: str
    buffers: tuple[BufferReport, ...]
    paths: tuple[PathReport, ...]
    chosen: str
    reason: str


def describe(prologue: Prologue, choice: Choice, config: ModelConfig) -> PrologueReport:
    """Report on a layer's prologue; its weights may be on any device, "meta" too, and are not read."""
    kind: LayerKind = "kda" if prologue.kind == "kda" else "mla"
    known: Mapping[str, Path] = (
        kda_paths(config.kda.full_rank_gate) if kind == "kda" else mla_paths(config.mla.output_gate)
    )
    buffers = _buffers(prologue.weights)
    paths = []
    for name, verdict in choice.verdicts.items():
        gemms = _dry_run(known[name], prologue.weights, buffers) if name in known and verdict.ok else ()
        paths.append(PathReport(path=name, ok=verdict.ok, reason=verdict.reason, gemms=gemms))
    return PrologueReport(
        kind=kind,
        buffers=tuple(_buffer_report(b) for b in buffers),
        paths=tuple(paths),
        chosen=" or ".join(choice.paths),
        reason=choice.reason,
    )


def _buffers(weights: KdaWeights | MlaWeights) -> tuple[MergedWeight, ...]:
    second = (weights.second,) if isinstance(weights, KdaWeights) else ()
    return (*weights.merged.parts, *second)


def _buffer_report(merged: MergedWeight) -> BufferReport:
    rows, depth = merged.buffer.shape
    return BufferReport(
        segments=tuple((s.name, s.rows) for s in merged.segments),
        pad=merged.size("pad"),
        rows=rows,
        depth=depth,
        format=FP8 if isinstance(merged, Fp8MergedWeight) else str(merged.buffer.dtype).removeprefix("torch."),
        bytes=merged.bytes,
    )


def _dry_run(path: Path, weights: KdaWeights | MlaWeights, buffers: tuple[MergedWeight, ...]) -> tuple[Gemm, ...]:
    calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]] = []
    inside: list[int] = []
    branch = Branch(streams=lambda device: None)  # nothing reaches the device, its streams neither

    def record(source: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Stands in for a GEMM: its result is allocated and never computed. An adapter's two are no part of a path."""
        result = source.new_empty(*source.shape[:-1], weight.shape[-2])
        if _home(weight, buffers):
            calls.append((source, weight, result, branch.on_side))
        return result

    def record_both(
        x: torch.Tensor, w: torch.Tensor, row0: int, w2: torch.Tensor, sync: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y = record(x, w)
        inside.append(len(calls))
        return y, record(ranks(y, row0, w2), w2)

    # codes are multiplied by wider activations
    x = buffers[-1].buffer.new_empty(_TOKENS, buffers[0].buffer.shape[1], dtype=torch.bfloat16)
    ops = replace(weights.ops, linear=record, fp8_linear=record, batched_linear=record, gemm_low_rank=record_both)
    with counters.paused():
        traced = replace(weights, ops=ops, branch=branch)
        outputs = path.run(traced, x)
        readers, own = _readers(outputs), len(calls)
        if (finished := outputs.finished(traced)) is not outputs:  # the decode step does the rest
            readers, inside = _readers(finished), [*range(own, len(calls))]
    launches = len(calls) - len(inside)
    assert launches == path.gemms, f"{path.name}: {launches} GEMMs, registered {path.gemms}"
    names = [_gemm_name(weight, source.shape[-1], buffers) for source, weight, _, _ in calls]
    copied = _copied(readers, [result for _, _, result, _ in calls])
    seen = [*readers.items(), *((name, source) for name, (source, *_) in zip(names, calls, strict=True))]
    gemms = []
    for i, (name, (source, weight, result, side)) in enumerate(zip(names, calls, strict=True)):
        depth, batch = source.shape[-1], weight.shape[0] if weight.ndim == 3 else 1
        rows = weight.numel() // depth
        parts = tuple(_parts(result, rows, seen)) or (Part(to=copied, columns=rows),)
        gemms.append(Gemm(name=name, rows=rows, depth=depth, batch=batch, parts=parts, side=side, inside=i in inside))
    return tuple(gemms)


def _readers(outputs: KdaInputs | MlaInputs) -> dict[str, torch.Tensor | None]:
    """Every output by name; a gate that is under way is taken."""
    values = {f.name: getattr(outputs, f.name) for f in fields(outputs)}
    return {name: value.take() if isinstance(value, Fork) else value for name, value in values.items()}


def _home(weight: torch.Tensor, buffers: tuple[MergedWeight, ...]) -> list[MergedWeight]:
    return [b for b in buffers if b.buffer.untyped_storage() is weight.untyped_storage()]


def _gemm_name(weight: torch.Tensor, depth: int, buffers: tuple[MergedWeight, ...]) -> str:
    """Named after the segments whose rows the weight views."""
    [merged] = _home(weight, buffers)
    first = int(weight.storage_offset()) // depth
    last = first + weight.numel() // depth
    covered = []
    for segment in merged.segments:
        start = int(merged.rows(segment.name).storage_offset()) // depth
        if first <= start and start + segment.rows <= last:
            covered.append(segment.name.removesuffix("_with_mqa").removesuffix("_proj"))
    label = "+".join(covered)
    return _NAMES.get(label, label)


def _copied(outputs: Mapping[str, torch.Tensor | None], results: list[torch.Tensor]) -> str:
    """The one output, if any, that is no view of a GEMM's result: nobody else reads what it was copied from."""
    known = [result.untyped_storage() for result in results]
    return next((name for name, t in outputs.items() if t is not None and t.untyped_storage() not in known), "pad")


def _parts(result: torch.Tensor, rows: int, readers: list[tuple[str, torch.Tensor | None]]) -> Iterator[Part]:
    """The readers of one GEMM result in column order; what nobody reads comes last, as the pad rows do."""
    storage = result.untyped_storage()
    mine = [(t.storage_offset(), name, t) for name, t in readers if t is not None and t.untyped_storage() is storage]
    unread = rows
    for _, name, t in sorted(mine, key=lambda reader: reader[0]):
        columns = t.numel() // _TOKENS
        unread -= columns
        yield Part(to=name, columns=columns)
    if mine and unread:
        yield Part(to="pad", columns=unread)

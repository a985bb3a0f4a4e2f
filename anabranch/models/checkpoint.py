"""Streams a safetensors checkpoint straight into the live views of a model: one tensor at a time, nothing kept."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from anabranch.models.kimi import KimiForCausalLM
from anabranch.models.manifest import Reading, make_manifest
from anabranch.models.shards import has_packed_experts, open_shard, scan
from anabranch.models.weights import StoredPart, copy_shard

_NAN_SCALE = 255  # the one E8M0 byte that is no power of two


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What one rank took from a checkpoint.

    Attributes:
        tensors: official tensors copied into this rank, whole or its part of them.
        elsewhere: official tensors that only other ranks hold (whole experts, other pipeline stages).
        vision: tensors of the vision tower and projector, skipped.
        ignored: rotary tables and layers beyond the model's, skipped.
        files: files read from.
        bytes: size of the filled parameters (padding rows left out).
        seconds: wall time.
    """

    tensors: int
    elsewhere: int
    vision: int
    ignored: int
    files: int
    bytes: int
    seconds: float


def detect_expert_format(path: str | Path) -> Literal["plain", "mxfp4"]:
    """Format of the routed experts by what the files hold, since a config may say either.

    ValueError: as `load_checkpoint` for files that cannot be read.
    """
    return "mxfp4" if has_packed_experts(scan(path)) else "plain"


def load_checkpoint(model: KimiForCausalLM, path: str | Path, *, progress: bool | None = None) -> LoadReport:
    """Fill every parameter of `model` (one rank's shard) from the checkpoint directory `path`.

    Names, shapes and dtypes of the whole checkpoint are checked before the first byte is copied; a rank then reads
    only its own part. Values are checked on the model's device after the copy. Peak host memory is that of the model,
    if it lives there, plus one memory-mapped file.

    Args:
        model: its parameters are overwritten in place; after an error they are undefined.
        progress: a bar on stderr; None shows it on the first rank when stderr is a terminal.

    Raises:
        ValueError: in one line with tensor and file: a damaged or missing file; a missing, unexpected, doubled,
            mis-shaped or mis-typed tensor; an unsupported quantisation; experts in another format than the model's;
            a value that is NaN or infinite in the model's dtype.
    """
    start, directory = time.perf_counter(), Path(path)
    manifest = make_manifest(scan(directory), model.config, directory)
    views: dict[str, torch.Tensor] = model.state_dict()
    work = {file: _local(tensors, views) for file, tensors in manifest.files.items()}
    shown = sys.stderr.isatty() and model.parallel.tp_rank == model.parallel.pp_rank == 0
    size = 0
    with _bar(shown if progress is None else progress, sum(map(len, work.values()))) as advance:
        for file, tensors in work.items():
            size += _read_file(file, tensors, views, model, advance) if tensors else 0
    return LoadReport(
        tensors=len(views),
        elsewhere=sum(len(parts) for tensors in manifest.files.values() for _, parts in tensors) - len(views),
        vision=manifest.vision,
        ignored=manifest.ignored,
        files=sum(map(bool, work.values())),
        bytes=size,
        seconds=time.perf_counter() - start,
    )


def _local(tensors: Reading, views: Mapping[str, torch.Tensor]) -> Reading:
    """Of what a file is read for, what this rank holds."""
    local = [(stored, [part for part in parts if part.name in views]) for stored, parts in tensors]
    return [(stored, parts) for stored, parts in local if parts]


def _read_file(
    file: Path,
    tensors: Reading,
    views: Mapping[str, torch.Tensor],
    model: KimiForCausalLM,
    advance: Callable[[], None],
) -> int:
    """Copy this rank's part of one file; returns bytes filled."""
    filled: list[tuple[str, torch.Tensor]] = []
    with open_shard(file) as shard:
        for stored, parts in tensors:
            source = shard.get_slice(stored)
            for part in parts:
                full = StoredPart(source, tuple(source.get_shape()), part)
                filled.append((stored, copy_shard(views[part.name], full, part.name, model.config, model.parallel)))
            advance()
        _check_finite(file, filled)
    return sum(view.nbytes for _, view in filled)


def _check_finite(file: Path, filled: Sequence[tuple[str, torch.Tensor]]) -> None:
    """One synchronisation a file, and no temporary of a tensor's size unless something is wrong."""
    suspects = torch.stack([_span(name, view) for name, view in filled])
    bad = [filled[i] for i in torch.nonzero(~torch.isfinite(suspects)).flatten().tolist()]
    if bad:
        name, view = bad[0]
        count = int((view == _NAN_SCALE if _is_scale(name) else ~torch.isfinite(view)).sum())
        kind = "an MXFP4 scale" if _is_scale(name) else str(view.dtype).removeprefix("torch.")
        more = f" (and {len(bad) - 1} more tensors)" if len(bad) > 1 else ""
        raise ValueError(f"{file}: tensor {name} has {count} values that are NaN or infinite as {kind}{more}")


def _span(name: str, view: torch.Tensor) -> torch.Tensor:
    """A scalar that is finite exactly if every value is."""
    if view.numel() == 0 or name.endswith(".weight_packed"):
        return torch.zeros((), dtype=torch.float64, device=view.device)
    low, high = torch.aminmax(view)
    if _is_scale(name):
        return torch.where(high == _NAN_SCALE, torch.inf, 0.0).double()
    return high.double() - low.double()


def _is_scale(name: str) -> bool:
    return name.endswith(".weight_scale")


@contextmanager
def _bar(shown: bool, total: int) -> Iterator[Callable[[], None]]:
    """Yields what to call once a tensor; draws on stderr if `shown`."""
    if not shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("loading weights", total=total)
        yield lambda: progress.advance(task)

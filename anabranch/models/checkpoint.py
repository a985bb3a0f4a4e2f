"""Streams a safetensors checkpoint straight into the live views of a model: one tensor at a time, nothing kept."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from anabranch.config.model import ModelConfig
from anabranch.models.fp8 import SCALE, Dequantized, as_grid, stored_fp8
from anabranch.models.kimi import KimiForCausalLM
from anabranch.models.manifest import Manifest, Reading, make_manifest
from anabranch.models.shards import has_packed_experts, open_shard, scan
from anabranch.models.weights import NAN_SCALE, Part, Sliceable, StoredPart, copy_shard, span


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What one rank took from a checkpoint.

    Attributes:
        tensors: official tensors read into this rank, whole or its part of them.
        dequantized: block-FP8 weights among them that are held in the model's dtype.
        elsewhere: official tensors that only other ranks hold (whole experts, other pipeline stages).
        vision: tensors of the vision tower and projector, skipped.
        ignored: rotary tables and layers beyond the model's, skipped.
        files: files read from.
        bytes: size of the filled parameters (padding rows left out).
        seconds: wall time.
    """

    tensors: int
    dequantized: int
    elsewhere: int
    vision: int
    ignored: int
    files: int
    bytes: int
    seconds: float


def detect_formats(path: str | Path, config: ModelConfig) -> ModelConfig:
    """`config` with the format of the routed experts and the block-FP8 weights that the files hold, since a config
    may say anything.

    ValueError: as `load_checkpoint` for files that cannot be read.
    """
    stored = scan(path)
    experts: Literal["plain", "mxfp4"] = "mxfp4" if has_packed_experts(stored) else "plain"
    return replace(config, expert_format=experts, fp8=stored_fp8(stored, config))


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
            mis-shaped or mis-typed tensor; an unsupported quantisation; weights in another format than the model's;
            a value that is NaN or infinite in the model's dtype.
    """
    start, directory = time.perf_counter(), Path(path)
    manifest = make_manifest(scan(directory), model.config, directory)
    views: dict[str, torch.Tensor] = model.state_dict()
    work = {file: _local(tensors, views) for file, tensors in manifest.files.items()}
    grids = _read_grids(manifest, views)
    shown = sys.stderr.isatty() and model.parallel.tp_rank == model.parallel.pp_rank == 0
    size = 0
    with _bar(shown if progress is None else progress, sum(map(len, work.values()))) as advance:
        for file, tensors in work.items():
            size += _read_file(file, tensors, views, grids, model, advance) if tensors else 0
    here = len(views) + len(grids)
    return LoadReport(
        tensors=here,
        dequantized=len(grids),
        elsewhere=sum(len(parts) for tensors in manifest.files.values() for _, parts in tensors) - here,
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


def _read_grids(manifest: Manifest, views: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Scales of the block-FP8 weights that this rank holds in plain form, by the weight's name."""
    grids = {}
    for file, tensors in manifest.files.items():
        wanted = {
            stored: weight
            for stored, [part, *_] in tensors
            if part.name.endswith(SCALE) and part.name not in views
            and (weight := part.name.removesuffix(SCALE) + ".weight") in views
        }  # fmt: skip
        if wanted:
            with open_shard(file) as shard:
                grids |= {weight: as_grid(shard.get_tensor(stored)) for stored, weight in wanted.items()}
    return grids


def _full(shard: Any, stored: str, part: Part, grids: Mapping[str, torch.Tensor]) -> Sliceable:
    """One official tensor, unsharded, in the form in which this rank holds it."""
    if part.name.endswith(SCALE):
        return as_grid(shard.get_tensor(stored))
    source = shard.get_slice(stored)
    full = StoredPart(source, tuple(source.get_shape()), part)
    return Dequantized(full, grids[part.name]) if part.name in grids else full


def _read_file(
    file: Path,
    tensors: Reading,
    views: Mapping[str, torch.Tensor],
    grids: Mapping[str, torch.Tensor],
    model: KimiForCausalLM,
    advance: Callable[[], None],
) -> int:
    """Copy this rank's part of one file; returns bytes filled."""
    filled: list[tuple[str, torch.Tensor]] = []
    with open_shard(file) as shard:
        for stored, parts in tensors:
            for part in parts:
                full = _full(shard, stored, part, grids)
                filled.append((stored, copy_shard(views[part.name], full, part.name, model.config, model.parallel)))
            advance()
        _check_finite(file, filled)
    return sum(view.nbytes for _, view in filled)


def _check_finite(file: Path, filled: Sequence[tuple[str, torch.Tensor]]) -> None:
    """One synchronisation a file, and no temporary of a tensor's size unless something is wrong."""
    suspects = torch.stack([span(name, view) for name, view in filled])
    bad = [filled[i] for i in torch.nonzero(~torch.isfinite(suspects)).flatten().tolist()]
    if bad:
        name, view = bad[0]
        scale = view.dtype == torch.uint8
        count = int((view == NAN_SCALE if scale else ~torch.isfinite(view.float())).sum())
        kind = "an MXFP4 scale" if scale else str(view.dtype).removeprefix("torch.")
        more = f" (and {len(bad) - 1} more tensors)" if len(bad) > 1 else ""
        raise ValueError(f"{file}: tensor {name} has {count} values that are NaN or infinite as {kind}{more}")


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

"""One physical weight buffer for projections that share an input, with a zero-copy view for every use of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from anabranch.fusion.product import Adapted, Adapter, Factor, Fp8Rows
from anabranch.ops.fp8_linear.reference import BLOCK, CODES, blocks

PAD_ROWS = 16  # at 6284 rows instead of 6288 a Hopper GEMM takes 1.2x to 3.3x as long (docs/fusions.md)


@dataclass(frozen=True, slots=True)
class Segment:
    """`rows` consecutive rows of a merged buffer that the checkpoint knows as the module `name`."""

    name: str
    rows: int


class NamedViews(nn.Module):
    """A module whose state dict holds named live views of its buffers instead of the buffers themselves."""

    def views(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name below this module, live view) of every tensor that a checkpoint knows."""
        raise AssertionError(f"{type(self).__name__} names no views")

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        for name, view in self.views():
            destination[prefix + name] = view if keep_vars else view.detach()

    def _load_from_state_dict(
        self,
        state_dict: dict,
        prefix: str,
        local_metadata: dict,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        expected = dict(self.views())
        unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k[len(prefix) :] not in expected]
        for name, view in expected.items():
            given = state_dict.get(prefix + name)
            if given is None:
                missing_keys.append(prefix + name)
            elif given.shape != view.shape:
                error_msgs.append(f"{prefix}{name}: shape {tuple(given.shape)}, need {tuple(view.shape)}")
            else:
                with torch.no_grad():
                    view.copy_(given)


class MergedWeight(NamedViews):
    """A [rows, *row_shape] buffer made of named row segments and zero rows up to a multiple of `pad_to`.

    The buffer is the one parameter; each segment is a live view, so an in-place update of either is seen by both.
    The state dict holds the segments under the names they have without merging (`<parent>.<segment>.weight`). Segments
    start at multiples of `start_at`; rows skipped for that are zero.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        row_shape: Sequence[int],
        *,
        pad_to: int = 1,
        start_at: int = 1,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.segments = tuple(segments)
        self.adapters = nn.ModuleDict()
        self._sound: set[tuple[str, str]] = set()
        self._span: dict[str, tuple[int, int]] = {}
        end = 0
        for segment in segments:
            start = _up(end, start_at)
            end = start + segment.rows
            self._span[segment.name] = (start, end)
        self.used_rows = end
        total = _up(end, pad_to)
        self._span["pad"] = (end, total)
        buffer = torch.empty(total, *row_shape, dtype=dtype, device=device)
        for start, stop in _gaps([*self._span.values()][:-1], total):
            buffer[start:stop].zero_()
        self.buffer = nn.Parameter(buffer, requires_grad=False)

    @property
    def parts(self) -> "tuple[MergedWeight, ...]":
        """The physical buffers behind this one: itself."""
        return (self,)

    @property
    def bytes(self) -> int:
        """Everything that is held, pad and scales included."""
        return sum(p.numel() * p.element_size() for p in self.parameters())

    def rows(self, first: str, last: str | None = None) -> torch.Tensor:
        """View of all rows from segment `first` to the end of segment `last` (`pad` is the name of the zero rows)."""
        return self.buffer[self._span[first][0] : self._span[last or first][1]]

    def size(self, first: str, last: str | None = None) -> int:
        """Number of rows in `rows(first, last)`."""
        return self._span[last or first][1] - self._span[first][0]

    def factor(self, first: str, last: str | None = None) -> Factor:
        """What a GEMM over `rows(first, last)` multiplies by. The rules keep adapted segments out of wider ranges."""
        last = last or first
        adapter = getattr(self.adapters, first, None)
        if isinstance(adapter, Adapter) and first == last:
            return Adapted(self._factor(first, last), adapter)
        if (first, last) not in self._sound:
            self._check(first, last)
        return self._factor(first, last)

    def adapt(self, name: str, adapter: Adapter) -> None:
        """From now on products with segment `name` carry this adapter."""
        assert name in self._span, name
        self.adapters[name] = adapter
        self._sound.clear()

    def _check(self, first: str, last: str) -> None:
        """One GEMM over these rows must neither bypass an adapter nor multiply by the rows of a gap."""
        names = list(self._span)
        inside = names[names.index(first) : names.index(last) + 1]
        assert not [name for name in inside if name in self.adapters], f"{first}..{last} would bypass an adapter"
        assert self.size(first, last) == sum(self.size(name) for name in inside), f"{first}..{last} spans a gap"
        self._sound.add((first, last))

    def views(self) -> Iterator[tuple[str, torch.Tensor]]:
        for segment in self.segments:
            yield f"{segment.name}.weight", self.rows(segment.name)

    def _factor(self, first: str, last: str) -> torch.Tensor | Fp8Rows:
        return self.rows(first, last)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        # the segments are known as modules of the parent: `a.b.in_proj.` -> `a.b.`
        super()._save_to_state_dict(destination, prefix[: prefix[:-1].rfind(".") + 1], keep_vars)


class Fp8MergedWeight(MergedWeight):
    """The same in block-FP8: one buffer of codes, one grid of scales. Every segment starts a row of scale blocks, so
    any run of segments without a gap between them is a weight of its own, scales included."""

    def __init__(self, segments: Sequence[Segment], columns: int, *, device: torch.device | str | None = None) -> None:
        super().__init__(segments, (columns,), pad_to=PAD_ROWS, start_at=BLOCK, dtype=CODES, device=device)
        grid = torch.empty(blocks(self.buffer.shape[0]), blocks(columns), dtype=torch.float32, device=device)
        self.scale = nn.Parameter(grid, requires_grad=False)

    def scales(self, first: str, last: str | None = None) -> torch.Tensor:
        """The rows of the grid that lie over `rows(first, last)`."""
        return self.scale[self._span[first][0] // BLOCK : blocks(self._span[last or first][1])]

    def views(self) -> Iterator[tuple[str, torch.Tensor]]:
        for segment in self.segments:
            yield f"{segment.name}.weight", self.rows(segment.name)
            yield f"{segment.name}.weight_scale_inv", self.scales(segment.name)

    def _factor(self, first: str, last: str) -> Fp8Rows:
        return Fp8Rows(self.rows(first, last), self.scales(first, last))


class SplitWeight:
    """Two merged buffers of different formats that answer as one. What a GEMM covers lies in one of them."""

    def __init__(self, *parts: MergedWeight) -> None:
        self.parts = parts
        self.segments = tuple(segment for part in parts for segment in part.segments)
        self._home = {segment.name: part for part in parts for segment in part.segments} | {"pad": parts[-1]}

    def rows(self, first: str, last: str | None = None) -> torch.Tensor:
        return self._part(first, last).rows(first, last)

    def size(self, first: str, last: str | None = None) -> int:
        return self._part(first, last).size(first, last)

    def factor(self, first: str, last: str | None = None) -> Factor:
        return self._part(first, last).factor(first, last)

    def _part(self, first: str, last: str | None) -> MergedWeight:
        part = self._home[first]
        assert part is self._home[last or first], f"{first}..{last} lies in two buffers"
        return part


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _gaps(spans: Sequence[tuple[int, int]], total: int) -> Iterator[tuple[int, int]]:
    """The rows that no span covers."""
    at = 0
    for start, stop in [*spans, (total, total)]:
        if start > at:
            yield at, start
        at = stop


class MergedOwner(nn.Module):
    """A module with MergedWeight children: `load_state_dict` finds their segments under the un-merged names."""

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args, **kwargs) -> None:
        for child_name, child in self.named_children():
            if isinstance(child, MergedWeight):
                for name, _ in child.views():
                    key = f"{prefix}{name}"
                    if key in state_dict:  # torch hands a child only the keys below its own name
                        state_dict[f"{prefix}{child_name}.{name}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

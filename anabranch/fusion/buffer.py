"""One physical weight buffer for projections that share an input, with a zero-copy view for every use of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

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
    The state dict holds the segments under the names they have without merging (`<parent>.<segment>.weight`).
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        row_shape: Sequence[int],
        *,
        pad_to: int = 1,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.segments = tuple(segments)
        self._span: dict[str, tuple[int, int]] = {}
        end = 0
        for segment in segments:
            self._span[segment.name] = (end, end + segment.rows)
            end += segment.rows
        self.used_rows = end
        total = -(-end // pad_to) * pad_to
        self._span["pad"] = (end, total)
        buffer = torch.empty(total, *row_shape, dtype=dtype, device=device)
        buffer[end:].zero_()
        self.buffer = nn.Parameter(buffer, requires_grad=False)

    def rows(self, first: str, last: str | None = None) -> torch.Tensor:
        """View of all rows from segment `first` to the end of segment `last` (`pad` is the name of the zero rows)."""
        return self.buffer[self._span[first][0] : self._span[last or first][1]]

    def size(self, first: str, last: str | None = None) -> int:
        """Number of rows in `rows(first, last)`."""
        return self._span[last or first][1] - self._span[first][0]

    def views(self) -> Iterator[tuple[str, torch.Tensor]]:
        for segment in self.segments:
            yield f"{segment.name}.weight", self.rows(segment.name)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        # the segments are known as modules of the parent: `a.b.in_proj.` -> `a.b.`
        super()._save_to_state_dict(destination, prefix[: prefix[:-1].rfind(".") + 1], keep_vars)


class MergedOwner(nn.Module):
    """A module with MergedWeight children: `load_state_dict` finds their segments under the un-merged names."""

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args, **kwargs) -> None:
        for child_name, child in self.named_children():
            if isinstance(child, MergedWeight):
                for segment in child.segments:
                    key = f"{prefix}{segment.name}.weight"
                    if key in state_dict:  # torch hands a child only the keys below its own name
                        state_dict[f"{prefix}{child_name}.{segment.name}.weight"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

"""Per-request memory: recurrent-state slots for KDA layers and latent pages for MLA layers, as pools."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from anabranch.config.model import ModelConfig
from anabranch.config.parallel import ParallelConfig
from anabranch.layers.batch import KdaState, LatentPages, LayerCache
from anabranch.layers.linear import share
from anabranch.ops.staging import to_host
from anabranch.parallel.layout import stage_layers

PAGE = 64  # tokens a page: the chunk length at which a recurrent state may be kept


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheShape:
    """Shapes and bytes of one rank's per-request memory. Counts are layers of this rank's pipeline stage."""

    kda_layers: int
    mla_layers: int
    conv: tuple[int, int]
    state: tuple[int, int, int]
    latent_dim: int
    dtype: torch.dtype
    state_dtype: torch.dtype

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        parallel: ParallelConfig,
        dtype: torch.dtype,
        state_dtype: torch.dtype = torch.float32,
    ) -> "CacheShape":
        """Heads are shared over the attention-TP group; latent rows are replicated over it."""
        kinds = [config.layer_kinds[i] for i in stage_layers(config.layers, parallel.pp_size, parallel.pp_rank)]
        heads, dim = share(config.kda.heads, parallel.attn_tp_size, "KDA heads (num_heads)"), config.kda.head_dim
        return cls(
            kda_layers=kinds.count("kda"),
            mla_layers=kinds.count("mla"),
            conv=(config.kda.conv_size - 1, 3 * heads * dim),
            state=(heads, dim, dim),
            latent_dim=config.mla.latent_dim,
            dtype=dtype,
            state_dtype=state_dtype,
        )

    @property
    def bytes_per_slot(self) -> int:
        """Recurrent memory of one request: S and conv rows of every KDA layer."""
        state = self.state[0] * self.state[1] * self.state[2] * self.state_dtype.itemsize
        return self.kda_layers * (state + self.conv[0] * self.conv[1] * self.dtype.itemsize)

    @property
    def bytes_per_token(self) -> int:
        """Latent rows of one token in every MLA layer."""
        return self.mla_layers * self.latent_dim * self.dtype.itemsize


class FreeList:
    """Numbers that are handed out and given back; giving one back twice is a bug and is caught."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._free = list(numbers)[::-1]
        self._inside = set(self._free)

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        number = self._free.pop()
        self._inside.remove(number)
        return number

    def give(self, number: int) -> None:
        assert number not in self._inside, f"{number} was given back twice"
        self._inside.add(number)
        self._free.append(number)


class CachePools(Protocol):
    """What a scheduler asks of a cache: how much there is, and what it does to slots and pages."""

    slots: int
    snapshots: int
    pages: int

    def clear(self, slot: int, pages: Iterable[int] = ()) -> None: ...

    def copy(self, source: int, target: int) -> None: ...

    def finite(self, slot: int) -> torch.Tensor: ...


class Cache:
    """The pools of one rank: slots for running requests and for snapshots, and latent pages.

    `layers` holds one KdaState or LatentPages for each layer of the stage, in order. `slots` are numbered first, then
    `snapshots`; both live in the same pools, so that saving a state is a copy inside a pool.
    """

    def __init__(
        self,
        config: ModelConfig,
        parallel: ParallelConfig,
        shape: CacheShape,
        *,
        slots: int,
        pages: int,
        device: torch.device | str,
        snapshots: int = 0,
    ) -> None:
        self.shape, self.slots, self.snapshots, self.pages = shape, slots, snapshots, pages
        self.device = torch.device(device)
        self.layers: list[LayerCache] = []
        count = slots + snapshots
        for i in stage_layers(config.layers, parallel.pp_size, parallel.pp_rank):
            if config.layer_kinds[i] == "kda":
                conv = torch.zeros(count, *shape.conv, dtype=shape.dtype, device=device)
                state = torch.zeros(count, *shape.state, dtype=shape.state_dtype, device=device)
                self.layers.append(KdaState(conv, state))
            else:
                # one page more than is handed out takes the rows of padding tokens
                rows = torch.zeros(pages + 1, PAGE, shape.latent_dim, dtype=shape.dtype, device=device)
                self.layers.append(LatentPages(rows))

    @property
    def bytes(self) -> int:
        """Real bytes of all pools."""
        tensors = [t for c in self.layers for t in ((c.conv, c.state) if isinstance(c, KdaState) else (c.pages,))]
        return sum(t.numel() * t.element_size() for t in tensors)

    def clear(self, slot: int, pages: Iterable[int] = ()) -> None:
        """Zero a slot, and pages: a new sequence starts from zeros, since kernels read unconditionally."""
        index, kda = list(pages), [layer for layer in self.layers if isinstance(layer, KdaState)]
        for states in ([layer.conv[slot] for layer in kda], [layer.state[slot] for layer in kda]):
            if states:  # a launch for each type, not for each layer
                torch._foreach_zero_(states)  # pyright: ignore[reportPrivateImportUsage]
        for layer in self.layers:
            if index and not isinstance(layer, KdaState):
                layer.pages[index] = 0

    def copy(self, source: int, target: int) -> None:
        """Copy the recurrent state of one slot to another."""
        pools = [pool for layer in self.layers if isinstance(layer, KdaState) for pool in (layer.conv, layer.state)]
        if pools:
            targets, sources = [p[target] for p in pools], [p[source] for p in pools]
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]

    def finite(self, slot: int) -> torch.Tensor:
        """Whether every state value of a slot is finite: a bool on the host, once the device has got here."""
        states = [layer.state[slot] for layer in self.layers if isinstance(layer, KdaState)]
        if not states:
            return torch.ones((), dtype=torch.bool)
        largest = torch._foreach_norm(states, torch.inf)  # pyright: ignore[reportPrivateImportUsage]
        return to_host(torch.stack(largest).isfinite().all())


def row_of(pages: Sequence[int], at: int) -> int:
    """The latent row of a sequence's token `at`."""
    return pages[at // PAGE] * PAGE + at % PAGE


def rows_of(pages: Sequence[int], first: int, count: int) -> np.ndarray:
    """int64 [count]: those of its tokens from `first` on."""
    at = np.arange(first, first + count)
    return np.asarray(pages, dtype=np.int64)[at // PAGE] * PAGE + at % PAGE


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` latent rows."""
    return -(-tokens // PAGE)

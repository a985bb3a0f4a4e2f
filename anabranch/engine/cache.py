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
    `snapshots`; both live in the same pools, so that saving a state is a copy inside a pool. What a slot holds for all
    layers is one block of each pool, of which a layer's pools are views: to clear or copy a slot is one launch a pool.
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
        kinds = [config.layer_kinds[i] for i in stage_layers(config.layers, parallel.pp_size, parallel.pp_rank)]
        room = (slots + snapshots, kinds.count("kda"))
        self._conv = torch.zeros(*room, *shape.conv, dtype=shape.dtype, device=device)
        self._state = torch.zeros(*room, *shape.state, dtype=shape.state_dtype, device=device)
        states = map(KdaState, self._conv.unbind(1), self._state.unbind(1))
        # one page more than is handed out takes the rows of padding tokens
        rows = (pages + 1, PAGE, shape.latent_dim)
        self.layers: list[LayerCache] = [
            next(states) if kind == "kda" else LatentPages(torch.zeros(*rows, dtype=shape.dtype, device=device))
            for kind in kinds
        ]

    @property
    def bytes(self) -> int:
        """Real bytes of all pools."""
        pages = [layer.pages for layer in self.layers if isinstance(layer, LatentPages)]
        return sum(t.numel() * t.element_size() for t in (self._conv, self._state, *pages))

    def clear(self, slot: int, pages: Iterable[int] = ()) -> None:
        """Zero a slot, and pages: a new sequence starts from zeros, since kernels read unconditionally."""
        self._conv[slot].zero_()
        self._state[slot].zero_()
        index = list(pages)
        for layer in self.layers:
            if index and not isinstance(layer, KdaState):
                layer.pages[index] = 0

    def copy(self, source: int, target: int) -> None:
        """Copy the recurrent state of one slot to another."""
        for pool in (self._conv, self._state):
            pool[target].copy_(pool[source])

    def finite(self, slot: int) -> torch.Tensor:
        """Whether every state value of a slot is finite: a bool on the host, once the device has got here."""
        state = self._state[slot]
        if not state.numel():
            return torch.ones((), dtype=torch.bool)
        return to_host(torch.linalg.vector_norm(state, torch.inf).isfinite())


def row_of(pages: Sequence[int], at: int) -> int:
    """The latent row of a sequence's token `at`."""
    return pages[at // PAGE] * PAGE + at % PAGE


def rows_of(pages: Sequence[int], first: int, count: int) -> np.ndarray:
    """int64 [count]: those of its tokens from `first` on."""
    used = np.asarray(pages[first // PAGE : pages_for(first + count)], dtype=np.int64)
    rows = used[:, None] * PAGE + np.arange(PAGE)
    return rows.ravel()[first % PAGE : first % PAGE + count]


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` latent rows."""
    return -(-tokens // PAGE)

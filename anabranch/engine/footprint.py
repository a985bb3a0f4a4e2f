"""Bytes of a model in a layout, rank by rank: counted on the real modules and cache shapes, built without memory."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from anabranch.config.fusion import FusionConfig
from anabranch.config.model import ModelConfig
from anabranch.engine.cache import PAGE, CacheShape, pages_for
from anabranch.fusion.buffer import MergedWeight
from anabranch.models.kimi import KimiForCausalLM
from anabranch.parallel.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """One rank's bytes; the ranks `ranks[0]..ranks[1]` of a pipeline stage are alike. `layers` is half open, 0-based.

    `pad_bytes` are part of `weight_bytes`. `fusion_bytes`: what merging holds beyond the projections and their pad,
    that is storage of merged buffers and of their views, less the segments, less the pad.
    """

    ranks: tuple[int, int]
    layers: tuple[int, int]
    kda_layers: int
    mla_layers: int
    weight_bytes: int
    pad_bytes: int
    fusion_bytes: int
    state_bytes_per_request: int
    latent_bytes_per_token: int

    def request_bytes(self, tokens: int) -> int:
        """Recurrent state of one request and whole latent pages for `tokens` tokens."""
        return self.state_bytes_per_request + pages_for(tokens) * PAGE * self.latent_bytes_per_token

    def requests(self, memory: int, tokens: int) -> int:
        """Requests of `tokens` tokens that fit beside the weights in `memory` bytes."""
        return max(0, memory - self.weight_bytes) // self.request_bytes(tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """Requests of `tokens` tokens in `memory` bytes a rank; the fullest stage limits. Activations are not counted."""

    memory: int
    tokens: int
    requests_per_replica: int
    replicas: int
    requests: int


def meta_model(
    config: ModelConfig,
    layout: Layout,
    rank: int,
    dtype: torch.dtype,
    fusion: FusionConfig,
    adapted: Collection[str] = (),
) -> KimiForCausalLM:
    """The model of global rank `rank` on the meta device: every shape, no memory."""
    place = layout.rank(rank)
    return KimiForCausalLM(config, parallel=place, fusion=fusion, dtype=dtype, device="meta", adapted=adapted)


def footprint(model: KimiForCausalLM, layout: Layout, state_dtype: torch.dtype) -> Footprint:
    """Count a rank's model, on any device, and the cache that goes with it."""
    stage, first = model.model.stage, model.parallel.pp_rank * layout.tp
    cache = CacheShape.of(model.config, model.parallel, model.dtype, state_dtype)
    merged = [m for m in model.modules() if isinstance(m, MergedWeight)]
    return Footprint(
        ranks=(first, first + layout.tp - 1),
        layers=(stage.start, stage.stop),
        kda_layers=cache.kda_layers,
        mla_layers=cache.mla_layers,
        weight_bytes=_bytes([*model.parameters(), *model.buffers()]),
        pad_bytes=sum(_bytes([m.rows("pad")]) for m in merged),
        fusion_bytes=sum(_beyond_segments(m) for m in merged),
        state_bytes_per_request=cache.bytes_per_slot,
        latent_bytes_per_token=cache.bytes_per_token,
    )


def capacity(footprints: Sequence[Footprint], layout: Layout, memory: int, tokens: int) -> Capacity:
    """How many requests fit; `footprints` holds one for each pipeline stage.

    Raises:
        ValueError: `tokens` or `memory` is not positive.
    """
    for name, value in (("memory", memory), ("len", tokens)):
        if value < 1:
            raise ValueError(f"{name}={value}: need at least 1")
    each = min(f.requests(memory, tokens) for f in footprints)
    return Capacity(
        memory=memory,
        tokens=tokens,
        requests_per_replica=each,
        replicas=layout.dp_attention,
        requests=each * layout.dp_attention,
    )


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _beyond_segments(merged: MergedWeight) -> int:
    views = [merged.rows(segment.name) for segment in merged.segments]
    storages = {t.untyped_storage() for t in (merged.buffer, *views)}
    return sum(s.nbytes() for s in storages) - _bytes([*views, merged.rows("pad")])

"""How much of a device the cache gets: slots first, then snapshots, then latent pages."""

import os
from dataclasses import dataclass

import torch

from anabranch.engine.cache import PAGE, Cache, CacheShape, pages_for
from anabranch.models.kimi import KimiForCausalLM

SNAPSHOTS_A_SEQUENCE = 4  # a prompt's last boundary, and some turns of a conversation
SNAPSHOT_SHARE = 0.25  # most of the budget that snapshots take


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes of one rank: what the device has, what the model took, and how the rest is spent."""

    device_bytes: int
    used_bytes: int
    budget_bytes: int
    slots: int
    snapshots: int
    pages: int
    bytes_per_slot: int
    bytes_per_page: int

    @property
    def cache_bytes(self) -> int:
        return (self.slots + self.snapshots) * self.bytes_per_slot + (self.pages + 1) * self.bytes_per_page

    def __str__(self) -> str:
        gib = 2**30
        return (
            f"memory: {self.budget_bytes / gib:.2f} GiB for the cache; {self.slots} slots + {self.snapshots} snapshots "
            f"x {self.bytes_per_slot:,} B, {self.pages} pages of {PAGE} tokens x {self.bytes_per_page:,} B "
            f"= {self.cache_bytes / gib:.2f} GiB"
        )


def plan_memory(
    model: KimiForCausalLM,
    shape: CacheShape,
    *,
    max_seqs: int,
    max_len: int,
    memory_fraction: float,
    prefix_cache: bool,
    reserve: int = 0,
) -> MemoryPlan:
    """Divide what `memory_fraction` of the device leaves after the model and `reserve` bytes for activations.

    Raises:
        ValueError: the slots for `max_seqs` or the pages for one request of `max_len` do not fit; says what would.
    """
    if not 0 < memory_fraction <= 1:
        raise ValueError(f"memory_fraction={memory_fraction}: need 0 < memory_fraction <= 1")
    total, used = _device_bytes(next(model.parameters()).device)
    budget = int(total * memory_fraction) - used - reserve
    page = PAGE * shape.bytes_per_token
    left = budget - max_seqs * shape.bytes_per_slot - page
    if left < pages_for(max_len) * page:
        raise ValueError(
            f"max_seqs={max_seqs} of {shape.bytes_per_slot:,} B state and max_len={max_len} of {page:,} B a page do "
            f"not fit into {budget:,} B (memory_fraction={memory_fraction} of {total:,} B less {used:,} B in use)"
        )
    snapshots = 0
    if prefix_cache:
        most = int(budget * SNAPSHOT_SHARE) // max(1, shape.bytes_per_slot)
        snapshots = max(1, min(SNAPSHOTS_A_SEQUENCE * max_seqs, most, left // max(1, shape.bytes_per_slot) - 1))
        left -= snapshots * shape.bytes_per_slot
    wanted = pages_for(max_len) * max_seqs * (2 if prefix_cache else 1)
    return MemoryPlan(
        device_bytes=total,
        used_bytes=used,
        budget_bytes=budget,
        slots=max_seqs,
        snapshots=snapshots,
        pages=max(pages_for(max_len), min(wanted, left // max(1, page))),
        bytes_per_slot=shape.bytes_per_slot,
        bytes_per_page=page,
    )


def make_cache(model: KimiForCausalLM, shape: CacheShape, plan: MemoryPlan) -> Cache:
    """Allocate what the plan says; the real bytes must be the planned ones."""
    cache = Cache(
        model.config,
        model.parallel,
        shape,
        slots=plan.slots,
        snapshots=plan.snapshots,
        pages=plan.pages,
        device=next(model.parameters()).device,
    )
    assert cache.bytes == plan.cache_bytes, f"planned {plan.cache_bytes} B, allocated {cache.bytes} B"
    return cache


def _device_bytes(device: torch.device) -> tuple[int, int]:
    """(total, in use) of a device; of a CPU its physical memory and what is not available of it."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, total - free
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_PHYS_PAGES") * page, (os.sysconf("SC_PHYS_PAGES") - os.sysconf("SC_AVPHYS_PAGES")) * page

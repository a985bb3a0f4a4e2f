"""The pools of a rank: what a slot holds is one block of each, and work on a slot leaves every other alone."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from anabranch.config.parallel import ParallelConfig
from anabranch.engine.cache import PAGE, Cache, CacheShape, row_of, rows_of
from anabranch.layers.batch import KdaState, LatentPages

SLOTS, SNAPSHOTS, PAGES = 3, 2, 5


def made(*kinds: str, state_dtype: torch.dtype = torch.float32) -> Cache:
    """Pools of layers of these kinds, of odd sizes, filled with numbers that no two places share."""
    shape = CacheShape(
        kda_layers=kinds.count("kda"),
        mla_layers=kinds.count("mla"),
        conv=(3, 9),
        state=(3, 5, 5),
        latent_dim=7,
        dtype=torch.float32,
        state_dtype=state_dtype,
    )
    config: Any = SimpleNamespace(layers=len(kinds), layer_kinds=kinds)
    cache = Cache(config, ParallelConfig(), shape, slots=SLOTS, pages=PAGES, device="cpu", snapshots=SNAPSHOTS)
    for i, pool in enumerate(pools(cache)):
        pool.copy_(torch.arange(1, pool.numel() + 1).view(pool.shape) + i / 16)
    return cache


def pools(cache: Cache) -> list[torch.Tensor]:
    """Every layer's own, the recurrent ones first."""
    kda = [pool for layer in cache.layers if isinstance(layer, KdaState) for pool in (layer.conv, layer.state)]
    return kda + [layer.pages for layer in cache.layers if isinstance(layer, LatentPages)]


class Launches(TorchDispatchMode):
    """Counts operations that are not views."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := function.overloadpacket.__name__) != "select":
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


def test_a_slot_is_one_block_of_each_pool():
    cache = made("kda", "kda", "mla", "kda")
    states = [layer for layer in cache.layers if isinstance(layer, KdaState)]
    for layer in states:
        assert layer.conv.shape == (SLOTS + SNAPSHOTS, 3, 9)
        assert layer.state.shape == (SLOTS + SNAPSHOTS, 3, 5, 5)
        assert layer.conv[0].is_contiguous()
        assert layer.state[0].is_contiguous()
    for kind, size in (("conv", 27), ("state", 75)):
        starts = [getattr(layer, kind).storage_offset() for layer in states]
        assert starts == [0, size, 2 * size]
        assert {getattr(layer, kind).stride(0) for layer in states} == {3 * size}
    assert cache.bytes == sum(pool.numel() * 4 for pool in pools(cache))


def test_clear_zeroes_one_slot_and_these_pages():
    cache = made("kda", "mla", "kda")
    before = [pool.clone() for pool in pools(cache)]
    with Launches() as launches:
        cache.clear(1)
    assert launches.seen == ["zero_", "zero_"]
    cache.clear(1, [0, 4])
    for got, want in zip(pools(cache), before, strict=True):
        want[[1] if len(want) == SLOTS + SNAPSHOTS else [0, 4]] = 0
        assert torch.equal(got, want)


def test_copy_moves_one_slot():
    cache = made("kda", "mla", "kda")
    before = [pool.clone() for pool in pools(cache)]
    with Launches() as launches:
        cache.copy(0, SLOTS)
    assert launches.seen == ["copy_", "copy_"]
    for got, want in zip(pools(cache), before, strict=True):
        if len(want) == SLOTS + SNAPSHOTS:
            want[SLOTS] = want[0]
        assert torch.equal(got, want)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_is_not_finite_is_found_in_any_layer(value, state_dtype):
    cache = made("kda", "kda", "mla", state_dtype=state_dtype)
    for layer in range(2):
        kda = cache.layers[layer]
        assert isinstance(kda, KdaState)
        old = kda.state[2, 2, 4, 4].item()
        kda.state[2, 2, 4, 4] = value
        assert [bool(cache.finite(slot)) for slot in range(SLOTS + SNAPSHOTS)] == [True, True, False, True, True]
        kda.state[2, 2, 4, 4] = old
    assert bool(cache.finite(2))


def test_a_stage_without_recurrent_layers():
    cache = made("mla", "mla")
    before = [pool.clone() for pool in pools(cache)]
    cache.clear(0)
    cache.copy(0, 1)
    assert bool(cache.finite(0))
    assert all(torch.equal(got, want) for got, want in zip(pools(cache), before, strict=True))


def test_rows_of_a_stretch():
    pages = [7, 2, 9, 0]
    for first in (0, 1, PAGE - 1, PAGE, 2 * PAGE + 5):
        for count in (0, 1, 3, PAGE, 4 * PAGE - first):
            if first + count <= 4 * PAGE:
                want = [row_of(pages, at) for at in range(first, first + count)]
                assert rows_of(pages, first, count).tolist() == want

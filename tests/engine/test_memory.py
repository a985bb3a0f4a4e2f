"""The memory plan: slots first, pages with the rest, refused in one line when it cannot be, and equal to real bytes."""

import pytest
import torch
from helpers.oracle import engine_model
from helpers.ref_tiny import kimi_k3_tiny, random_weights

from anabranch.engine import memory
from anabranch.engine.cache import PAGE, CacheShape, pages_for
from anabranch.engine.memory import make_cache, plan_memory

TINY = kimi_k3_tiny()


@pytest.fixture(scope="module")
def model():
    return engine_model(TINY, random_weights(TINY, 0))


def plan(model, monkeypatch, total: int, used: int = 0, **options):
    monkeypatch.setattr(memory, "_device_bytes", lambda device: (total, used))
    shape = CacheShape.of(model.config, model.parallel, torch.float32)
    values = {"max_seqs": 4, "max_len": 200, "memory_fraction": 1.0, "prefix_cache": True} | options
    return plan_memory(model, shape, **values), shape


def test_a_large_device_gets_what_can_be_used_and_no_more(model, monkeypatch):
    got, shape = plan(model, monkeypatch, 10**12)
    assert (got.slots, got.snapshots, got.pages) == (4, 16, 2 * 4 * pages_for(200))
    assert got.bytes_per_page == PAGE * shape.bytes_per_token


def test_a_small_device_is_filled_and_not_overfilled(model, monkeypatch):
    shape = CacheShape.of(model.config, model.parallel, torch.float32)
    total = 8 * shape.bytes_per_slot + 9 * PAGE * shape.bytes_per_token
    got, _ = plan(model, monkeypatch, total)
    assert got.slots == 4
    assert got.snapshots >= 1
    assert pages_for(200) <= got.pages
    assert got.cache_bytes <= total
    without, _ = plan(model, monkeypatch, total, prefix_cache=False)
    assert without.snapshots == 0
    assert without.cache_bytes <= total


def test_reserve_fraction_and_use_count_against_the_budget(model, monkeypatch):
    got, _ = plan(model, monkeypatch, 10**9, used=10**8, memory_fraction=0.5, reserve=10**7)
    assert got.budget_bytes == 5 * 10**8 - 10**8 - 10**7


@pytest.mark.parametrize("options", [{"max_seqs": 10**6}, {"max_len": 10**9}, {"used": 10**9}])
def test_what_does_not_fit_is_refused_with_its_numbers(model, monkeypatch, options):
    with pytest.raises(ValueError, match=r"max_seqs=.*max_len=.*do not fit into .* B"):
        plan(model, monkeypatch, 10**9, **options)


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.1])
def test_fraction_is_checked(model, monkeypatch, fraction):
    with pytest.raises(ValueError, match="memory_fraction="):
        plan(model, monkeypatch, 10**9, memory_fraction=fraction)


def test_planned_bytes_are_real_bytes(model, monkeypatch):
    got, shape = plan(model, monkeypatch, 10**9)
    cache = make_cache(model, shape, got)
    assert cache.bytes == got.cache_bytes
    assert f"{got.slots} slots + {got.snapshots} snapshots" in str(got)

"""Expert parallelism by all-to-all: the rule that picks it, and layers over gloo against one rank that has all."""

import random

import pytest
import torch
from helpers.gloo_ranks import MOE_CASES, moe_layer, run_job

from anabranch.parallel.exchange import Traffic

KL = Traffic(
    ranks=16, experts=256, chosen=8, gathered=4608, summed=4608, there=4608, back=4608, shared=3 * 2304 * 1024 * 2
)


@pytest.mark.parametrize(("ranks", "experts", "chosen"), [(2, 256, 8), (4, 12, 3), (16, 896, 16), (8, 8, 1), (4, 4, 4)])
def test_the_reach_is_what_random_choices_give(ranks, experts, chosen):
    rng, each = random.Random(0), experts // ranks
    traffic = Traffic(ranks=ranks, experts=experts, chosen=chosen, gathered=1, summed=1, there=1, back=1, shared=0)
    drawn = [len({e // each for e in rng.sample(range(experts), chosen)} - {0}) for _ in range(4000)]
    assert traffic.reach == pytest.approx(sum(drawn) / len(drawn), rel=0.05)


def test_bytes_by_hand():
    traffic = Traffic(ranks=2, experts=4, chosen=1, gathered=10, summed=20, there=10, back=10, shared=100)
    # two ranks, each gets the other's block of 6 and gives back as many sums
    assert traffic.by_gather((6, 1)) == 2 * 6 * 30
    # half of 7 rows leave, with a choice of 8 bytes, and come back; the matrices go to one other rank each
    assert traffic.by_all_to_all((6, 1)) == 7 * 0.5 * 28 + 100


@pytest.mark.parametrize(
    ("counts", "picked"),
    [
        ((512,) * 16, True),  # a prompt everywhere
        ((2048, *(1,) * 15), True),  # a prompt on one replica: the others' blocks would be padded to its length
        ((8,) * 16, False),  # decode: the shared experts' matrices weigh more than the rows
        ((1,) * 16, False),
        (None, False),
    ],
)
def test_all_to_all_is_picked_where_it_moves_fewer_bytes(counts, picked):
    assert KL.prefers_all_to_all(counts, captured=False) is picked
    assert not KL.prefers_all_to_all(counts, captured=True)
    if counts is not None:
        assert picked == (KL.by_all_to_all(counts) < KL.by_gather(counts))


def test_two_ranks_with_even_load_gather():
    # with two ranks nearly every row has an expert on the other one
    two = Traffic(ranks=2, experts=256, chosen=8, gathered=4608, summed=4608, there=4608, back=4608, shared=0)
    assert not two.prefers_all_to_all((512, 512), captured=False)
    assert two.prefers_all_to_all((512, 1), captured=False)


@pytest.mark.parametrize("world", [2, 4])
def test_layers_over_ranks_equal_the_whole(world):
    """Uneven rows, one row for nobody, experts that nobody chose; plain and latent experts, with shared ones."""
    run_job(world, moe_layer)
    assert len(MOE_CASES) >= 3
    assert torch.get_num_threads() == 1

"""Collectives over gloo between four processes: sums, gathers, uneven rows, and the hand-over between stages."""

import multiprocessing

import pytest
from helpers.gloo_ranks import exchange, hand_over
from torch._C._distributed_c10d import TCPStore

CASES = {"free": (exchange, False), "ordered": (exchange, True), "stages": (hand_over, False)}


@pytest.mark.parametrize("case", CASES)
def test_four_ranks(case):
    work, deterministic = CASES[case]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=work, args=(rank, store.port, deterministic)) for rank in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0] * 4

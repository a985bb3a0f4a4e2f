"""Ranks of test jobs are forked from a server that has imported everything once."""

import multiprocessing

import pytest

from anabranch.engine import ranks


@pytest.fixture(scope="module", autouse=True)
def _quick_ranks():
    before, ranks.START_METHOD = ranks.START_METHOD, "forkserver"
    multiprocessing.set_forkserver_preload(["anabranch.engine.ranks"])
    yield
    ranks.START_METHOD = before

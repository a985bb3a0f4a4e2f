"""Several ranks under the memory state machine of one: whatever runs ahead, every answer is right and nothing leaks."""

import pytest
from helpers.memory_machine import CONFIG, Memory
from helpers.toy import answer, toy_request
from helpers.toy_job import check_ranks, toy_job
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from anabranch.engine.engine import Engine
from anabranch.engine.request import Request
from anabranch.engine.sampling import SamplingParams
from anabranch.engine.text import TextStream
from anabranch.parallel.layout import Layout

LAYOUTS = [Layout(tp=2), Layout(tp=2, dp_attention=2), Layout(tp=4, dp_attention=2), Layout(pp=2), Layout(tp=2, pp=3)]


class JointMemory(Memory):
    """The same rules over a job of ranks."""

    @initialize(
        layout=st.sampled_from(LAYOUTS),
        slots=st.integers(1, 4),
        pages=st.integers(7, 14),
        snapshots=st.integers(0, 4),
        chunk=st.integers(1, 200),
        ahead=st.booleans(),
        saves=st.booleans(),
    )
    def start(self, layout, **options):
        self.engine, self.requests = toy_job(CONFIG, layout, **options), []

    def teardown(self):
        super().teardown()
        if hasattr(self, "engine"):
            check_ranks(self.engine)


TestJointMemory = JointMemory.TestCase
TestJointMemory.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("ahead", [False, True])
def test_orders_go_out_before_the_last_step_is_read(layout, ahead):
    engine = toy_job(CONFIG, layout, slots=4, pages=9, snapshots=0, ahead=ahead)
    requests = [toy_request(i, [i + 1, 5], 6) for i in range(2 * layout.dp_attention)]
    for request in requests:
        engine.add(request)
    depths = []
    while engine.busy:
        engine.step()
        depths.append((len(requests[0].sampled), requests[0].computed))
    assert [r.output for r in requests] == [answer(r.prompt, 6) for r in requests]
    # on one stage the next token is in the cache before this one is known
    if layout.pp == 1:
        assert depths == [(n, min(n + 1 + ahead, 7)) for n in range(1, 6)] + [(6, 0)] * (len(depths) - 5)
    check_ranks(engine)
    # a rank has had as many steps at once as the head may have under way
    assert engine.fleet.hub.most_unread == (layout.pp - 1 + (layout.pp == 1) if ahead else 0)


def test_a_replica_short_of_pages_takes_them_back_while_another_is_busy():
    """One replica always has a step under way; the other must not wait for that before it preempts."""
    engine = toy_job(CONFIG, Layout(tp=2, dp_attention=2), slots=3, pages=7, snapshots=0, ahead=True)
    long, *others = engine.replicas
    requests = [toy_request(i, [i + 1] * 60, 80) for i in range(3)]
    for request in requests:
        Engine.add(long, request)
    busy = toy_request(9, [7], 400)
    Engine.add(others[0], busy)
    engine._home[busy] = others[0]
    while not all(r.finish_reason for r in requests):
        assert not busy.finish_reason, "the replica that is short of pages was starved"
        engine.step()
    assert long.scheduler.preemptions
    for r in requests:
        assert r.output == answer(r.prompt, 80)


def test_a_choice_that_looks_at_its_history_waits_for_it():
    engine = toy_job(CONFIG, Layout(tp=2, dp_attention=2), slots=2, pages=9, snapshots=0, ahead=True)
    params = SamplingParams(temperature=0.0, max_tokens=6, presence_penalty=1e-3)
    engine.add(Request(id=0, prompt=[3, 5], params=params, text=TextStream(None)))
    [request] = engine.scheduler.waiting
    while not request.finish_reason:
        engine.step()
        assert not request.slot >= 0 or request.computed == len(request.prompt) + len(request.sampled) - 1
    assert request.output == answer([3, 5], 6)

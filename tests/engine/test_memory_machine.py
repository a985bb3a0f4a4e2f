"""Slots, pages and snapshots as a state machine, and ten thousand random steps: no leak, no cross-talk."""

import random

import pytest
from helpers.oracle import model_config
from helpers.ref_tiny import kimi_linear_tiny
from helpers.toy import POISON, VOCAB, answer, check_memory, toy_engine, toy_request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

CONFIG = model_config(kimi_linear_tiny(vocab=VOCAB))
PREFIXES = [[t] * 64 + [u] * 64 + [v] * 64 for t in (1, 2) for u in (3, 4) for v in (5, 6)]


class Memory(RuleBasedStateMachine):
    """Requests that share prefixes come, run, are aborted and poisoned, in memory that is always short."""

    @initialize(
        slots=st.integers(1, 4),
        pages=st.integers(7, 14),
        snapshots=st.integers(0, 4),
        chunk=st.integers(1, 200),
        ahead=st.booleans(),
    )
    def start(self, slots, pages, snapshots, chunk, ahead):
        self.engine = toy_engine(CONFIG, slots=slots, pages=pages, snapshots=snapshots, chunk=chunk, ahead=ahead)
        self.requests = []

    @rule(
        prefix=st.sampled_from(PREFIXES),
        cut=st.integers(0, 192),
        tail=st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=70),
        count=st.integers(1, 90),
        poisoned=st.booleans(),
    )
    def arrive(self, prefix, cut, tail, count, poisoned):
        prompt = prefix[:cut] + tail + ([POISON] if poisoned and len(tail) % 5 == 0 else [])
        request = toy_request(len(self.requests), prompt, count)
        self.engine.add(request)
        self.requests.append(request)

    @precondition(lambda self: self.engine.busy)
    @rule(count=st.integers(1, 20))
    def steps(self, count):
        for _ in range(count):
            if self.engine.busy:
                self.engine.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        self.engine.abort(data.draw(st.sampled_from(self.requests)))

    @rule()
    def flush(self):
        if self.engine.scheduler.prefix:
            self.engine.scheduler.prefix.flush()

    @invariant()
    def memory_is_whole(self):
        if hasattr(self, "engine"):
            check_memory(self.engine)

    @invariant()
    def answers_are_right(self):
        for r in getattr(self, "requests", ()):
            assert r.output == answer(r.prompt, len(r.sampled))
            assert (r.finish_reason == "error") == (r.error is not None)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(20_000):
            if not self.engine.busy:
                break
            self.engine.step()
        assert not self.engine.busy, "starved"
        for r in self.requests:
            expected = "error" if POISON in r.prompt else "length"
            assert r.finish_reason in (expected, "abort")
        if self.engine.scheduler.prefix:
            self.engine.scheduler.prefix.flush()
        assert len(self.engine.scheduler.pages) == self.engine.runner.cache.pages
        check_memory(self.engine)


TestMemory = Memory.TestCase
TestMemory.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize(("snapshots", "ahead"), [(0, False), (5, True)])
def test_ten_thousand_random_steps(snapshots, ahead):
    rng = random.Random(snapshots)
    engine = toy_engine(CONFIG, slots=4, pages=11, snapshots=snapshots, chunk=90, ahead=ahead)
    requests, alive, steps, number = [], [], 0, 0
    while steps < 10_000:
        if rng.random() < 0.2 and len(engine.scheduler.waiting) < 6:
            prompt = rng.choice(PREFIXES)[: rng.randrange(193)] + [
                rng.randrange(VOCAB - 1) for _ in range(rng.randrange(1, 60))
            ]
            if rng.random() < 0.05:
                prompt.append(POISON)
            alive.append(toy_request(number, prompt, rng.randrange(1, 150)))
            engine.add(alive[-1])
            number += 1
        if rng.random() < 0.02 and alive:
            engine.abort(rng.choice(alive))
        if engine.busy:
            engine.step()
        steps += 1
        if steps % 50 == 0:
            check_memory(engine)
        ended = [r for r in alive if r.finish_reason]
        for r in ended:
            assert r.output == answer(r.prompt, len(r.sampled))
        requests += ended
        alive = [r for r in alive if not r.finish_reason]
    reasons = {reason: sum(r.finish_reason == reason for r in requests) for reason in ("length", "abort", "error")}
    assert min(reasons.values()) > 3, reasons
    assert engine.scheduler.preemptions > 20
    if snapshots:
        assert engine.scheduler.prefix_hits > 1000
    assert engine.nonfinite == reasons["error"]

"""Slots, pages and snapshots as a state machine over the toy model; whoever tests another engine overrides `make`."""

from helpers.oracle import model_config
from helpers.ref_tiny import kimi_linear_tiny
from helpers.toy import POISON, VOCAB, answer, check_memory, toy_engine, toy_request
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
        saves=st.booleans(),
    )
    def start(self, **options):
        self.engine, self.requests = self.make(**options), []

    def make(self, **options):
        return toy_engine(CONFIG, **options)

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
        self.engine.flush()

    @invariant()
    def memory_is_whole(self):
        if hasattr(self, "engine"):
            for engine in self.engine.replicas:
                check_memory(engine)

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
        self.engine.flush()
        for engine in self.engine.replicas:
            assert len(engine.scheduler.pages) == engine.runner.cache.pages
            check_memory(engine)

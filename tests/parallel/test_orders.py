"""What a rank knows of its requests equals what the head knows, whatever happens to them."""

import pickle

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from anabranch.engine.orders import Scribe, Shadows
from anabranch.engine.request import Request
from anabranch.engine.sampler import Sampled
from anabranch.engine.sampling import SamplingParams
from anabranch.engine.text import TextStream


class Orders(RuleBasedStateMachine):
    """Requests that grow, lose their pages, are given others' pages and end; steps over any of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scribe, self.shadows = Scribe(), Shadows()
        self.requests: list[Request] = []
        self.page = 0
        self.segments: list = []
        self.seen: list = []

    @rule(length=st.integers(1, 5))
    def arrive(self, length):
        # numbers of two callers may be equal
        request = Request(7, [length] * length, SamplingParams(max_tokens=9), TextStream(None), frozenset({1}))
        request.prefill_until = length
        self.requests.append(request)

    @rule(data=st.data())
    def change(self, data):
        if not self.requests:
            return
        r = data.draw(st.sampled_from(self.requests))
        match data.draw(st.sampled_from(["grow", "fly", "sample", "save", "preempt", "readmit", "swap", "end"])):
            case "grow":
                self.page += 1
                r.pages.append(self.page)
                r.computed += 1
            case "fly":
                r.flying += 1
            case "sample":
                r.flying = max(0, r.flying - 1)
                r.sampled.append(Sampled(len(r.sampled) + 40, -0.5))
            case "save":
                r.saving = None if r.saving else (64 * len(r.pages), 9)
            case "preempt":
                r.slot, r.pages, r.computed, r.saving = -1, [], 0, None
            case "readmit":
                r.slot, r.pages = 1, r.pages[: len(r.pages) // 2]
                r.prefill_until = r.known
            case "swap" if r.pages:
                self.page += 1
                r.pages[data.draw(st.integers(0, len(r.pages) - 1))] = self.page
            case "end":
                r.finish_reason = "stop"
                self.requests.remove(r)

    @rule(data=st.data(), turn=st.integers())
    def step(self, data, turn):
        chosen = [r for r in self.requests if data.draw(st.booleans())]
        self.segments = [(r, i) for i, r in enumerate(chosen)]
        order = pickle.loads(pickle.dumps(self.scribe.step(self.segments, turn)))
        assert order.turn == turn
        self.seen = self.shadows.obey(order)
        for (want, n), (got, count) in zip(self.segments, self.seen, strict=True):
            assert n == count
            for name in (
                "prompt",
                "params",
                "eos_ids",
                "computed",
                "prefill_until",
                "slot",
                "pages",
                "output",
                "flying",
                "saving",
            ):
                assert getattr(got, name) == getattr(want, name), name
            assert (got.known, got.decoding, got.banned) == (want.known, want.decoding, want.banned)


TestOrders = Orders.TestCase
TestOrders.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_an_ended_request_is_forgotten_with_the_next_step():
    scribe, shadows = Scribe(), Shadows()
    request = Request(0, [1], SamplingParams(), TextStream(None))
    shadows.obey(scribe.step([(request, 1)], None))
    assert len(shadows._requests) == 1
    request.finish_reason = "stop"
    shadows.obey(scribe.step([], None))
    assert not shadows._requests
    assert not scribe._known

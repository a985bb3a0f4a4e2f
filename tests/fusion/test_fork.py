"""The fork: main first, side behind the mark alone, exactly one join on every way out, no memory given away early."""

import pytest
import torch
from helpers.streams import FakeStreams
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from anabranch.fusion import counters
from anabranch.fusion.fork import Branch, CudaStreams, Fork

X = torch.zeros(1)


def forked() -> tuple[Branch, FakeStreams]:
    streams = FakeStreams()
    return Branch(streams=lambda device: streams), streams


def test_main_is_recorded_first_and_the_side_waits_for_the_mark_alone():
    branch, streams = forked()
    streams.work("before")
    with counters.counting() as ran:
        result = branch.beside("f", X, main=lambda: streams.work("wide"), side=lambda: streams.work("small"))
    streams.work("after")
    assert result == (None, None)
    assert streams.log == [
        ("work", "main", "before"),
        ("record", "main"),
        ("work", "main", "wide"),
        ("wait", "side"),
        ("work", "side", "small"),
        ("record", "side"),
        ("wait", "main"),
        ("work", "main", "after"),
    ]
    assert streams.after["small"] == {"before"}
    assert streams.after["after"] == {"before", "wide", "small"}
    assert (ran, branch.open) == ({"fork.side": 1}, 0)


def test_a_fork_stays_out_over_whatever_is_recorded_before_its_value_is_taken():
    branch, streams = forked()
    gate = branch.fork("gate", X, lambda: streams.work("gate") or 7)
    streams.work("attention")
    assert branch.open == 1
    assert gate.take() == 7
    assert "attention" not in streams.after["gate"]
    assert not streams.unjoined()


def test_a_value_is_taken_once():
    branch, streams = forked()
    for fork in (branch.fork("f", X, lambda: 1), Fork.ready(1)):
        assert fork.take() == 1
        with pytest.raises(RuntimeError, match="was taken before"):
            fork.take()
        fork.close()  # the consumer's way out, after it took the value
    closed = branch.fork("f", X, lambda: streams.work("never"))
    closed.close()
    closed.close()
    with pytest.raises(RuntimeError, match="fork f was closed before"):
        closed.take()
    assert "never" not in streams.after


def test_a_fork_that_is_closed_leaves_nothing_open():
    """Check 7 of the edge cases: a gate that is skipped must not leave a branch that capture finds unjoined."""
    branch, streams = forked()
    streams.graph = True
    with counters.counting() as ran:
        branch.fork("gate", X, lambda: streams.work("gate")).close()
    assert (branch.open, streams.unjoined(), ran) == (0, frozenset(), {"fork.skipped": 1})
    assert "side" not in streams.known


@pytest.mark.parametrize("graph", [False, True])
def test_a_side_that_raises_has_joined(graph):
    branch, streams = forked()
    streams.graph = graph

    def side():
        streams.work("half")
        raise ValueError("side")

    with pytest.raises(ValueError, match="side"):
        branch.beside("f", X, main=lambda: streams.work("wide"), side=side)
    assert streams.log[-2:] == [("record", "side"), ("wait", "main")]
    assert (streams.unjoined(), branch.open, branch.on_side, streams.current) == (frozenset(), 0, False, "main")


def test_main_work_that_raises_drops_the_side():
    branch, streams = forked()

    def main():
        raise ValueError("main")

    with pytest.raises(ValueError, match="main"):
        branch.beside("f", X, main=main, side=lambda: streams.work("never"))
    assert (branch.open, "never" in streams.after, streams.unjoined()) == (0, False, frozenset())


def test_a_fork_inside_side_work_opens_no_second_stream():
    branch, streams = forked()

    def side():
        return branch.beside("in", X, main=lambda: streams.work("a"), side=lambda: streams.work("b"))

    with counters.counting() as ran:
        branch.beside("out", X, main=lambda: streams.work("wide"), side=side)
    assert [entry for entry in streams.log if entry[0] == "work"] == [
        ("work", "main", "wide"), ("work", "side", "a"), ("work", "side", "b"),
    ]  # fmt: skip
    assert ran == {"fork.side": 1, "fork.in_order": 1}
    assert not streams.unjoined()


def test_a_fork_of_the_main_stream_does_not_join_on_the_side():
    branch, _ = forked()
    outer = branch.fork("outer", X, lambda: 1)
    with pytest.raises(RuntimeError, match="fork outer must join on the main stream"):
        branch.beside("f", X, main=lambda: None, side=outer.take)


def test_a_fork_joins_in_the_segment_that_it_left():
    branch, streams = forked()
    streams.graph = True
    fork = branch.fork("gate", X, lambda: streams.work("gate"))
    streams.graph = False
    with pytest.raises(RuntimeError, match="fork gate must join on the main stream of the graph segment that it left"):
        fork.take()
    assert "gate" not in streams.after


def test_a_segment_boundary_joins_what_is_out_and_keeps_the_values():
    branch, streams = forked()
    streams.graph = True
    forks = [branch.fork(f"f{i}", X, lambda i=i: streams.work(f"side {i}") or i) for i in range(3)]
    forks[1].close()
    with counters.counting() as ran:
        branch.boundary()
    assert ran == {"fork.side": 2, "fork.boundary": 2}
    assert not streams.unjoined()
    before = len(streams.log)
    assert [forks[0].take(), forks[2].take()] == [0, 2]
    assert len(streams.log) == before


def test_without_streams_the_side_follows_the_main_work():
    branch, order = Branch(), []
    with counters.counting() as ran:
        branch.beside("f", X, main=lambda: order.append("main"), side=lambda: order.append("side"))
    assert (order, ran) == (["main", "side"], {"fork.in_order": 1})


def test_eager_outputs_are_lent_to_the_main_stream():
    branch, streams = forked()
    a, b = torch.zeros(2), torch.zeros(3)
    _, taken = branch.beside("f", X, main=lambda: None, side=lambda: (a, [b], None))
    assert taken == (a, [b], None)
    assert [(t.data_ptr(), s) for t, s in streams.lent] == [(a.data_ptr(), "main"), (b.data_ptr(), "main")]


def test_in_a_capture_memory_freed_after_the_mark_costs_the_overlap():
    """A graph's pool gives the side stream back what the main stream freed, though main work may still read it."""
    branch, streams = forked()
    streams.graph = True
    _, output = branch.beside("a", X, main=lambda: None, side=lambda: torch.zeros(4)[:2])
    fork = branch.fork("b", X, lambda: streams.work("b"))
    streams.work("reads the output")
    del output
    with counters.counting() as ran:
        fork.take()
    assert ran == {"fork.late": 1}
    assert "reads the output" in streams.after["b"]
    assert streams.lent == []


def test_in_a_capture_memory_that_lives_or_was_freed_before_does_not():
    branch, streams = forked()
    streams.graph = True
    _, kept = branch.beside("a", X, main=lambda: None, side=lambda: torch.zeros(4))
    _, freed = branch.beside("a", X, main=lambda: None, side=lambda: torch.zeros(4))
    view = kept[1:]
    del freed, kept
    fork = branch.fork("b", X, lambda: streams.work("b"))
    streams.work("between")
    with counters.counting() as ran:
        fork.take()
    assert ran == {"fork.side": 1}
    assert "between" not in streams.after["b"]
    assert view.shape == (3,)


def test_inputs_live_until_the_join():
    import weakref

    branch, _ = forked()
    x = torch.zeros(3)
    alive = weakref.ref(x)
    fork = branch.fork("f", X, lambda x=x: x.sum())
    del x
    assert alive() is not None
    fork.take()
    assert alive() is None


def test_a_side_stream_is_never_the_stream_that_is_recorded_on(monkeypatch):
    class Ring:
        """Streams come from a ring of three."""

        handed = 0

        def __init__(self, device):
            self.cuda_stream = 100 + Ring.handed % 3
            Ring.handed += 1

    monkeypatch.setattr(torch.cuda, "Stream", Ring)
    streams = CudaStreams(torch.device("cuda"))
    mains = [Ring(None) for _ in range(7)]
    for main in mains:
        side = streams.side(main)
        assert side.cuda_stream != main.cuda_stream
        assert streams.side(main) is side


class ForkMachine(RuleBasedStateMachine):
    """Any order of forks, joins, skips, errors and segment ends: nothing unjoined, nothing lost, one side stream."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.streams = forked()
        self.forks: dict[int, tuple[Fork, frozenset[str]]] = {}
        self.number = 0

    def name(self) -> str:
        self.number += 1
        return f"w{self.number}"

    @rule()
    def main_work(self) -> None:
        self.streams.work(self.name())

    @rule()
    def leave(self) -> None:
        name = self.name()
        fork = self.branch.fork(name, X, lambda: self.streams.work(name) or name)
        self.forks[self.number] = fork, self.streams.known["main"]

    @precondition(lambda self: self.forks)
    @rule(data=st.data(), how=st.sampled_from(["take", "close", "join then take", "join then close"]))
    def finish(self, data, how) -> None:
        number = data.draw(st.sampled_from(sorted(self.forks)))
        fork, mark = self.forks.pop(number)
        name = f"w{number}"
        joined = name in self.streams.after
        if how.startswith("join"):
            fork.join()
        if how.endswith("take"):
            assert fork.take() == name
        fork.close()
        assert (name in self.streams.after) == (how != "close" or joined)
        if name in self.streams.after:
            # the mark, and side work recorded earlier; never main work recorded after the mark
            sides = {w for _, stream, w in (e for e in self.streams.log if e[0] == "work") if stream == "side"}
            extra = self.streams.after[name] - mark - sides
            assert all(any(e in self.streams.after[s] for s in sides) for e in extra)

    @rule(fails=st.sampled_from(["", "main", "side", "both nested"]))
    def beside(self, fails) -> None:
        name = self.name()

        def main():
            if fails == "main":
                raise KeyError
            self.streams.work(f"{name} main")

        def side():
            self.streams.work(name)
            if fails == "side":
                raise KeyError
            if fails == "both nested":
                self.branch.beside("inner", X, main=lambda: self.streams.work(f"{name} in"), side=self.fail)

        if fails:
            with pytest.raises(KeyError):
                self.branch.beside(name, X, main, side)
        else:
            self.branch.beside(name, X, main, side)

    def fail(self) -> None:
        raise KeyError

    @rule()
    def segment_ends(self) -> None:
        self.branch.boundary()
        assert self.branch.open == 0

    @precondition(lambda self: not self.branch.open)
    @rule()
    def another_segment(self) -> None:
        self.streams.graph = not self.streams.graph

    @invariant()
    def nothing_is_unjoined(self) -> None:
        assert not self.streams.unjoined()
        assert set(self.streams.known) <= {"main", "side"}
        assert not self.branch.on_side
        assert self.streams.current == "main"
        still_out = [n for n in self.forks if f"w{n}" not in self.streams.after]
        assert self.branch.open == len(still_out)


ForkMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
TestForkMachine = ForkMachine.TestCase

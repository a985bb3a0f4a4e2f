"""The anabranch itself: work that leaves the main stream, runs beside it and joins it again exactly once.

A fork marks a point of the main stream. Main work is recorded first; the side work is recorded when the fork joins and
waits for nothing but the mark, so the device may run it beside everything that was recorded in between. A fork that is
closed instead of joined has recorded nothing: there is no branch that a graph capture could find open. Recording the
side first would cost a graph one more replay stream a fork (98 against 29 in a public engine: SGLang #32770).

Lifetime: side inputs live until the join, because the fork holds them. Side outputs come from the side stream's part
of the allocator; run eagerly they are lent to the main stream (`record_stream`), in a capture they stay in the graph's
pool, and a fork that could be given memory which the main stream has only just freed does not overlap.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from anabranch.fusion import counters

Value = TypeVar("Value")
Other = TypeVar("Other")


class Streams(Protocol):
    """What a fork asks of a device. Streams and events are opaque."""

    def main(self) -> Any:
        """The stream that work is being recorded on."""
        ...

    def side(self, main: Any) -> Any:
        """The one side stream, never `main` itself."""
        ...

    def record(self, stream: Any) -> Any:
        """An event behind all that `stream` holds now."""
        ...

    def wait(self, stream: Any, event: Any) -> None:
        """Nothing recorded on `stream` from now on starts before `event`."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Records on `stream` inside the block."""
        ...

    def capturing(self) -> bool:
        """Whether a graph is being captured."""
        ...

    def lend(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep `tensor`'s memory, once freed, until `stream` is done with it."""
        ...


class CudaStreams:
    """Streams of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side: torch.cuda.Stream | None = None

    def main(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def side(self, main: torch.cuda.Stream) -> torch.cuda.Stream:
        # streams are handed out from a ring of 32: one may be the very stream that a graph is captured on
        while self._side is None or self._side.cuda_stream == main.cuda_stream:
            self._side = torch.cuda.Stream(self.device)
        return self._side

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def lend(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        tensor.record_stream(stream)


def streams_of(device: torch.device) -> Streams | None:
    """The streams of a device; None where there are none, and side work follows the main work."""
    return CudaStreams(device) if device.type == "cuda" else None


class Fork(Generic[Value]):
    """One fork: joined at most once, its value taken at most once, or closed without a trace."""

    def __init__(self, branch: "Branch", name: str, streams: Streams | None, side: Callable[[], Value]) -> None:
        self.name, self._branch, self._streams = name, branch, streams
        self._side: Callable[[], Value] | None = side
        self._value: Value | None = None
        self._state = "open"
        if streams is not None:
            self._captured = streams.capturing()
            self._mark = streams.record(streams.main())
            self._lent = branch.lent() if self._captured else []

    @classmethod
    def ready(cls, value: Value) -> "Fork[Value]":
        """A value that the main stream already has: taken and closed like that of any other fork."""
        fork = cls(_NO_BRANCH, "ready", None, lambda: value)
        fork._value, fork._side, fork._state = value, None, "joined"
        return fork

    def take(self) -> Value:
        """The side's value, joined if need be. Once; again, or after `close`, it is a RuntimeError."""
        if self._state in ("taken", "closed"):
            raise RuntimeError(f"fork {self.name} was {self._state} before")
        self.join()
        value, self._value, self._state = self._value, None, "taken"
        return cast(Value, value)

    def join(self) -> None:
        """Record the side work and make the main stream wait for it; no effect once it has joined."""
        if self._state != "open":
            return
        side, streams = self._side, self._streams
        assert side is not None
        self._side, self._state = None, "closed"
        self._branch.forget(self)
        self._value = self._in_order(side) if streams is None else self._beside(streams, side)
        self._state = "joined"

    def close(self) -> None:
        """The value is not wanted: an open fork records nothing. No effect on one whose value was taken."""
        if self._state == "open":
            self._branch.forget(self)
            counters.add("fork.skipped")
        if self._state != "taken":
            self._side, self._value, self._state = None, None, "closed"

    def _in_order(self, side: Callable[[], Value]) -> Value:
        counters.add("fork.in_order")
        with self._branch.aside():
            return side()

    def _beside(self, streams: Streams, side: Callable[[], Value]) -> Value:
        if self._branch.on_side or streams.capturing() != self._captured:
            raise RuntimeError(f"fork {self.name} must join on the main stream of the graph segment that it left")
        main = streams.main()
        stream = streams.side(main)
        streams.wait(stream, self._mark)
        # the side might be given what the main stream freed after the mark and still reads
        late = any(reference.expired() for reference in self._lent)
        if late:
            streams.wait(stream, streams.record(main))
        counters.add("fork.late" if late else "fork.side")
        try:
            with streams.on(stream), self._branch.aside():
                value = side()
        finally:
            streams.wait(main, streams.record(stream))
        self._branch.lend(value, streams, main)
        return value


class Branch:
    """All forks of one model, over one side stream a device however many layers fork."""

    def __init__(self, streams: Callable[[torch.device], Streams | None] = streams_of) -> None:
        self._streams_of = streams
        self._streams: dict[torch.device, Streams | None] = {}
        self._open: list[Fork[Any]] = []
        self._lent: list[StorageWeakRef] = []
        self.on_side = False

    def fork(self, name: str, x: torch.Tensor, side: Callable[[], Value]) -> Fork[Value]:
        """Leave the main stream of x's device here. `side` may only read what was recorded before this call.

        A fork inside side work has no stream of its own: it runs where it joins.
        """
        if x.device not in self._streams:
            self._streams[x.device] = self._streams_of(x.device)
        fork = Fork(self, name, None if self.on_side else self._streams[x.device], side)
        self._open.append(fork)
        return fork

    def beside(
        self, name: str, x: torch.Tensor, main: Callable[[], Other], side: Callable[[], Value]
    ) -> tuple[Other, Value]:
        """Results of both; main work is recorded first, and the fork is gone also if either raises."""
        fork = self.fork(name, x, side)
        try:
            result = main()
            return result, fork.take()
        finally:
            fork.close()

    def boundary(self) -> None:
        """A graph segment ends here: what is still out joins first, and keeps its value for whoever takes it."""
        for fork in list(self._open):
            fork.join()
            counters.add("fork.boundary")

    @property
    def open(self) -> int:
        """Forks that have neither joined nor been closed."""
        return len(self._open)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is recorded inside is side work; nests."""
        before, self.on_side = self.on_side, True
        try:
            yield
        finally:
            self.on_side = before

    def forget(self, fork: Fork[Any]) -> None:
        self._open = [f for f in self._open if f is not fork]

    def lend(self, value: Any, streams: Streams, main: Any) -> None:
        """Hand the tensors in `value` over to the main stream."""
        for tensor in _tensors(value):
            if streams.capturing():
                self._lent.append(StorageWeakRef(tensor.untyped_storage()))
            else:
                streams.lend(tensor, main)

    def lent(self) -> list[StorageWeakRef]:
        """Side outputs that are still alive."""
        self._lent = [reference for reference in self._lent if not reference.expired()]
        return list(self._lent)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


_NO_BRANCH = Branch()

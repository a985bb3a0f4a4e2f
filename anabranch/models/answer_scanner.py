"""What the parsers of an answer emit, and how they find markers in text that is still growing."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

# Longest id or tag that is waited for; what is longer was never one, and is text.
HEADER_LIMIT = 1024


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the visible answer.

    `moved`: all of this was emitted as reasoning before, and only now proved to be the answer. A stream cannot take it
    back; whoever keeps the whole answer drops the reasoning.
    """

    text: str
    moved: bool = False


@dataclass(frozen=True, slots=True)
class CallDelta:
    """The start of tool call number `index`, which counts from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the JSON text of the arguments of tool call number `index`."""

    index: int
    text: str


TextDelta = ReasoningDelta | ContentDelta | ArgumentsDelta
Delta = TextDelta | CallDelta


class Scanner(ABC):
    """Cuts growing text at markers and holds back only what could still become one."""

    def __init__(self, markers: Sequence[str]) -> None:
        """`markers`: strings with their only "<" in front."""
        self._markers = tuple(markers)
        self._pattern = re.compile("|".join(map(re.escape, markers)))
        self._pending = ""
        self._blank = ""
        self._calls = 0
        self._deltas: list[Delta] = []

    def push(self, text: str) -> list[Delta]:
        """What `text` makes certain, neighbours of one kind joined."""
        self._pending += text
        at = 0
        while found := self._pattern.search(self._pending, at):
            self._text(self._pending[at : found.start()])
            end = self._marker(found)
            if end is None:
                at = found.start()
                break
            at = end
        else:
            end = len(self._pending) - self._uncertain(self._pending[at:])
            self._text(self._pending[at:end])
            at = end
        self._pending = self._pending[at:]
        return self._take()

    def finish(self) -> list[Delta]:
        """The rest, once the text has ended. A tag that was cut off is no text; a lone "<" is."""
        if not self._pattern.match(self._pending):
            self._text(self._pending)
        self._pending = ""
        self._end()
        return self._take()

    @abstractmethod
    def _text(self, text: str) -> None:
        """Takes text, perhaps empty, that is no marker."""

    @abstractmethod
    def _marker(self, found: re.Match[str]) -> int | None:
        """Takes a marker in `_pending`: where the text goes on, or None when that depends on more of it."""

    @abstractmethod
    def _end(self) -> None:
        """Emits what was still collected."""

    def _uncertain(self, text: str) -> int:
        """Length of the tail that could grow into a marker."""
        at = text.rfind("<")
        return len(text) - at if at >= 0 and any(marker.startswith(text[at:]) for marker in self._markers) else 0

    def _stray(self, text: str) -> None:
        """Text between elements: white space next to markup is layout, everything else is content."""
        text = self._blank + text
        kept = len(text.rstrip())
        self._emit(ContentDelta(text[:kept]))
        self._blank = text[kept:]

    def _start_call(self, call_id: str, name: str) -> None:
        self._deltas.append(CallDelta(self._calls, call_id, name))
        self._calls += 1

    def _arguments(self, text: str) -> None:
        """More arguments of the latest call."""
        self._emit(ArgumentsDelta(self._calls - 1, text))

    def _emit(self, delta: TextDelta) -> None:
        if delta.text:
            self._deltas.append(delta)

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return list(_joined(deltas))


def _joined(deltas: Iterable[Delta]) -> Iterator[Delta]:
    """Runs of text of one kind as one delta."""
    for key, run in groupby(deltas, key=lambda d: d if isinstance(d, CallDelta) else replace(d, text="")):
        if isinstance(key, CallDelta):
            yield key
        else:
            yield replace(key, text="".join(delta.text for delta in run if not isinstance(delta, CallDelta)))

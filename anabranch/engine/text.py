"""Text of a growing answer: whole characters only, and nothing that may turn out to be a stop string."""

from collections.abc import Sequence
from typing import Protocol


class StreamDecoder(Protocol):
    """Incremental detokeniser that holds back partial characters."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class TextStream:
    """Collects decoded text; `take` yields what is safe to show, `stopped` tells that a stop string was met.

    The stop string itself is not part of the text.
    """

    def __init__(self, decoder: StreamDecoder | None, stops: Sequence[str] = ()) -> None:
        self.decoder, self.stops = decoder, tuple(stops)
        self.text, self.stopped = "", False
        self._shown = 0

    def push(self, token: int) -> None:
        """Add one token."""
        if self.decoder is not None:
            self._extend(self.decoder.push(token))

    def finish(self) -> None:
        """No more tokens: held-back bytes become text."""
        if self.decoder is not None and not self.stopped:
            self._extend(self.decoder.flush())
        self.stops = ()

    def take(self) -> str:
        """Text that became certain since the last call."""
        end = len(self.text) - self._uncertain()
        piece = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece

    def _extend(self, piece: str) -> None:
        start = len(self.text)
        self.text += piece
        longest = max(map(len, self.stops), default=0)
        found = [at for stop in self.stops if (at := self.text.find(stop, max(0, start - longest + 1))) >= 0]
        if found:
            self.text, self.stopped, self.stops = self.text[: min(found)], True, ()

    def _uncertain(self) -> int:
        """Length of the longest tail that could still grow into a stop string."""
        tails = [n for stop in self.stops for n in range(1, len(stop)) if self.text.endswith(stop[:n])]
        return max(tails, default=0)

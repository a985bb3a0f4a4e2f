"""Streams that record what they are told, each knowing which work must be done before what it records next."""

from contextlib import contextmanager
from itertools import count

import torch


class FakeStreams:
    """Two streams at most, "main" and "side"; `log` is what was asked for, `after[op]` the work that precedes `op`."""

    def __init__(self) -> None:
        self.known: dict[str, frozenset[str]] = {"main": frozenset()}
        self.current, self.graph, self.events = "main", False, count()
        self.log: list[tuple] = []
        self.after: dict[str, frozenset[str]] = {}
        self.lent: list[tuple[torch.Tensor, str]] = []

    def work(self, name: str) -> None:
        """One kernel on the current stream."""
        self.log.append(("work", self.current, name))
        self.after[name] = self.known[self.current]
        self.known[self.current] |= {name}

    def main(self) -> str:
        return self.current

    def side(self, main: str) -> str:
        assert main == "main", "the side of a side stream was asked for"
        self.known.setdefault("side", frozenset())
        return "side"

    def record(self, stream: str):
        self.log.append(("record", stream))
        return next(self.events), self.known[stream]

    def wait(self, stream: str, event) -> None:
        self.log.append(("wait", stream))
        self.known[stream] |= event[1]

    @contextmanager
    def on(self, stream: str):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def capturing(self) -> bool:
        return self.graph

    def lend(self, tensor: torch.Tensor, stream: str) -> None:
        self.lent.append((tensor, stream))

    def unjoined(self) -> frozenset[str]:
        """Side work that the main stream does not wait for: what makes a graph capture fail."""
        return self.known.get("side", frozenset()) - self.known["main"]

"""What a rank does that the head tells what to compute: steps in order, and what came of them told in order."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from anabranch.engine.flight import Flight
from anabranch.engine.orders import Change, Shadows, StepOrder
from anabranch.engine.runner import Runner
from anabranch.models.update import update_weights


class Sender(Protocol):
    """A rank's way back to the head: see `engine.links.Post`."""

    def send(self, message: Any) -> None: ...

    def unhurried(self) -> None: ...


class Follower:
    """One rank at work.

    A step is launched when its order comes. The order says how many steps may stay unread behind it: with one the
    device always has the next step queued while the host tells what came of the last.

    Args:
        post: where results and answers go.
        runner: model and cache of this rank.
    """

    def __init__(self, post: Sender, runner: Runner) -> None:
        self.runner, self._post, self._shadows = runner, post, Shadows()
        self._flights: deque[Flight] = deque()  # steps that nobody has read
        self._calls: dict[str, Callable[..., Any]] = {
            "update_weights": self._update_weights,
            "expert_load": runner.model.expert_load,
        }

    def obey(self, message: tuple[Any, ...]) -> bool:
        """Do what one message says; False if it is the last."""
        match message:
            case ("step", order, kept):
                self._step(order)
                self._land(kept)
            case ("land",):
                self._land(len(self._flights) - 1)
            case ("look", changes, slots):
                self._change(changes)
                self._look(slots)
            case ("call", name, args):
                self._post.send(("answer", self._call(name, args)))
            case ("stop",):
                return False
        return True

    def _step(self, order: StepOrder) -> None:
        self._change(order.changes)
        behind = self._flights[-1] if order.turn.follow and self._flights else None
        flight = self.runner.launch(self._shadows.obey(order), behind, order.turn)
        flight.seal(self.runner.device)
        self._flights.append(flight)

    def _land(self, kept: int) -> None:
        """Tell what came of the oldest steps, until `kept` are under way."""
        while len(self._flights) > kept:
            flight = self._flights.popleft()
            if flight.segments and self.runner.samples:
                self._post.send(("results", flight.wait()))
            if flight.asked:
                flight.land()
                self._post.send(("finite", [bool(finite) for finite in flight.asked]))

    def _change(self, changes: Iterable[Change]) -> None:
        for what, slot, other in changes:
            getattr(self.runner.cache, what)(slot, other)

    def _look(self, slots: Sequence[int]) -> None:
        """Look at slots as the newest step leaves them; the answer goes with what came of it."""
        found = [self.runner.cache.finite(slot) for slot in slots]
        if self._flights:
            self._flights[-1].asked += found
            self._flights[-1].seal(self.runner.device)
            return
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize(self.runner.device)
        self._post.send(("finite", [bool(finite) for finite in found]))

    def _call(self, name: str, args: Any) -> tuple[Any, str | None]:
        self._post.unhurried()
        try:
            return self._calls[name](*args), None
        except ValueError as error:
            return None, str(error)

    def _update_weights(self, given: Path | Sequence[tuple[str, torch.Tensor]], write: bool) -> int:
        return update_weights(self.runner.model, given, write=write)

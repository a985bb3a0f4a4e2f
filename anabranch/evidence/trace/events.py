"""What a trace holds, whoever recorded it: launches on devices in integer nanoseconds, and named ranges on the host."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

CPU = -1  # the device id of host operations
GPU_KINDS = ("kernel", "memcpy", "memset")


class Place(NamedTuple):
    """One device as one process sees it; the process is 0 where the trace does not say."""

    process: int
    device: int

    def __str__(self) -> str:
        device = "cpu" if self.device == CPU else f"cuda:{self.device}"
        return f"{device} of process {self.process}" if self.process else device


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One launch, from `start` to `end` in ns. `stream` is a host thread where the device is the CPU.

    `launch` names the call that launched it (all nodes of one graph replay share it), `launched` and `thread` say when
    and where the host made that call; `node` is its graph node, `graph` whether a replay launched it.
    """

    name: str
    kind: str
    start: int
    end: int
    place: Place
    stream: int
    launch: int | None = None
    launched: int | None = None
    thread: int | None = None
    node: int | None = None
    graph: bool = False

    @property
    def took(self) -> int:
        return self.end - self.start


class Range(NamedTuple):
    """An NVTX range or a `record_function` block on a host thread, ns."""

    name: str
    start: int
    end: int
    thread: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Events in order of their start. `notes`: what a reader should know about the recording."""

    source: str
    format: str
    events: Sequence[Event]
    ranges: Sequence[Range] = ()
    devices: dict[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def places(self) -> list[Place]:
        return sorted({event.place for event in self.events})

    def on(self, device: int | None = None, process: int | None = None) -> "Trace":
        """The events of one place: the named one, else the first; ValueError if there is none such."""
        places = self.places()
        fits = [p for p in places if device in (None, p.device) and process in (None, p.process)]
        if not fits:
            wanted = f"device={device}" + ("" if process is None else f", process={process}")
            raise ValueError(f"{self.source}: {wanted} has no events; there are {', '.join(map(str, places))}")
        notes = self.notes
        if len(fits) > 1:
            notes = (*notes, f"{len(fits)} devices fit; taken is {fits[0]}, --device and --process name another")
        return replace(self, events=[e for e in self.events if e.place == fits[0]], notes=notes)


def ordered(events: Iterable[Event]) -> list[Event]:
    """By start, then end, then stream: one order for the same trace however it was stored."""
    return sorted(events, key=lambda event: (event.start, event.end, event.stream, event.name))


def pattern(text: str) -> re.Pattern[str]:
    """A regular expression that is searched for in names; ValueError in one line if it is none."""
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"pattern={text!r}: not a regular expression ({error})") from None


def short(name: str, width: int = 60) -> str:
    """A kernel's name without template arguments, parameters and return type, cut in the middle to `width`."""
    bare, depth = [], 0
    for letter in name.replace("(anonymous namespace)::", "").replace("->", "  "):
        if letter in "<(":
            depth += 1
        elif letter in ">)":
            depth -= 1
        elif depth == 0:
            bare.append(letter)
    text = "".join(bare).strip().removeprefix("void ") or name
    return text if len(text) <= width else f"{text[: width // 2 - 1]}..{text[1 - width // 2 :]}"

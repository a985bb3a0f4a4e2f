"""Exact launch counts by name: the proof that a path ran, or that it did not."""

from collections.abc import Sequence
from dataclasses import dataclass

from anabranch.evidence.trace.events import Trace, pattern


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """Launches whose name a pattern finds, in all traces together. `expected` None only asks."""

    pattern: str
    expected: int | None
    found: int
    places: dict[str, int]

    @property
    def ok(self) -> bool:
        return self.expected is None or self.found == self.expected

    def line(self) -> str:
        if self.expected is None:
            return f"{self.pattern!r}: {self.found} launches"
        if self.ok:
            return f"{self.pattern!r}: {self.found} launches, as expected"
        where = ", ".join(f"{place} {count}" for place, count in self.places.items()) or "nowhere"
        return f"{self.pattern!r}: {self.found} launches, expected {self.expected} ({where})"


def parse_expected(text: str) -> tuple[str, int | None]:
    """From "pattern=1104"; without a number behind the last "=" the whole is a pattern."""
    name, equals, number = text.rpartition("=")
    if equals and number.strip().isdecimal():
        if not name:
            raise ValueError(f"count={text!r}: needs a pattern before '=', as in pack=276")
        return name, int(number)
    return text, None


def count(traces: Sequence[Trace], wanted: Sequence[str], kinds: Sequence[str] = ()) -> list[Count]:
    """`wanted`: "pattern=number" or "pattern". `kinds`: only events of these kinds, if any are named."""
    events = [(trace, event) for trace in traces for event in trace.events if not kinds or event.kind in kinds]
    results = []
    for text in wanted:
        name, expected = parse_expected(text)
        seeking = pattern(name)
        places: dict[str, int] = {}
        for trace, event in events:
            if seeking.search(event.name):
                place = f"{trace.source} {event.place}" if len(traces) > 1 else str(event.place)
                places[place] = places.get(place, 0) + 1
        results.append(Count(pattern=name, expected=expected, found=sum(places.values()), places=places))
    return results

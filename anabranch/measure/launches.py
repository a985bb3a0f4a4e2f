"""What a GPU ran, by name: launches, the time in which anything ran, and the sum over launches, by torch.profiler."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_COPIES = ("Memcpy", "Memset")


@dataclass(frozen=True, kw_only=True, slots=True)
class Launches:
    """Figures of one repetition. `busy_us` counts overlapping launches once, `sum_us` each of them.

    `copies` are copies and fills; `table` has (name, us, launches), the longest first. Recording costs time of its own.
    """

    kernels: float
    copies: float
    busy_us: float
    sum_us: float
    table: tuple[tuple[str, float, float], ...]

    @property
    def count(self) -> float:
        return self.kernels + self.copies

    def lines(self, most: int = 12) -> Iterator[str]:
        """The table for people, shares of the sum included."""
        for name, us, count in self.table[:most]:
            yield f"  {us:10.1f} us {us / self.sum_us:6.1%} {count:7.1f}x  {name[:90]}"
        rest = self.table[most:]
        if rest:
            us = sum(row[1] for row in rest)
            yield f"  {us:10.1f} us {us / self.sum_us:6.1%} {sum(row[2] for row in rest):7.1f}x  {len(rest)} others"

    def fields(self, most: int = 40) -> dict[str, Any]:
        """The fields of a result row."""
        kernels = [[name, round(us, 2), count] for name, us, count in self.table[:most]]
        found = {"launches": self.count, "copies": self.copies}
        return found | {"busy_us": round(self.busy_us, 2), "sum_us": round(self.sum_us, 2), "kernels": kernels}


def record(run: Callable[[], Any], repetitions: int = 1, trace: Path | None = None) -> Launches:
    """Profile one call of `run`, which does the same thing `repetitions` times; the device is idle at both ends.

    Args:
        trace: also write the recording there, as Chrome JSON that `anabranch trace` reads.
    """
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    if trace is not None:
        seen.export_chrome_trace(str(trace))
    events = [
        (event.name[:120], event.time_range.start, event.time_range.end)
        for event in seen.events() or ()
        if event.device_type == torch.profiler.DeviceType.CUDA and not event.is_user_annotation
    ]
    return tally(events, repetitions)


def tally(events: Iterable[tuple[str, float, float]], repetitions: int = 1) -> Launches:
    """From (name, start, end) in microseconds."""
    spent, spans = defaultdict(lambda: [0.0, 0]), []
    for name, start, end in events:
        spans.append((start, end))
        spent[name][0] += end - start
        spent[name][1] += 1
    busy, reach = 0.0, float("-inf")
    for start, end in sorted(spans):
        busy, reach = busy + max(0.0, end - max(start, reach)), max(reach, end)
    copies = sum(count for name, (_, count) in spent.items() if name.startswith(_COPIES))
    each = [(name, us / repetitions, count / repetitions) for name, (us, count) in spent.items()]
    return Launches(
        kernels=(len(spans) - copies) / repetitions,
        copies=copies / repetitions,
        busy_us=busy / repetitions,
        sum_us=sum(us for _, us, _ in each),
        table=tuple(sorted(each, key=lambda row: (-row[1], row[0]))),
    )

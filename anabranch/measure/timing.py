"""Timing: the same work eager or replayed from a graph, arms taken in turn, and the floor that memory sets."""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

COPY_BYTES_PER_S = 4.3e12  # measured copy bandwidth of one H200
READ_BYTES_PER_S = 4.65e12  # measured read bandwidth of one H200: what a projection, which mostly reads, can reach
FLOPS_PER_S = 790e12  # measured dense bf16 rate of one H200


def floor_us(moved_bytes: float, flops: float = 0.0, bytes_per_s: float = COPY_BYTES_PER_S) -> float:
    """The longer of memory time and compute time on an H200."""
    return max(moved_bytes / bytes_per_s, flops / FLOPS_PER_S) * 1e6


class Stopwatch:
    """Times `run`, which makes `calls` calls: on CUDA by events, eager or replayed from one capture; else by the host.

    Making one runs `run` once or twice, so that nothing compiles or tunes itself while it is timed.
    """

    def __init__(self, run: Callable[[], Any], calls: int, device: torch.device, graph: bool = False) -> None:
        self.calls, self._device, self._graph = calls, device, None
        self._run: Callable[[], Any] = run
        if device.type != "cuda":
            assert not graph, "graphs need CUDA"
            run()
            return
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream(device).wait_stream(stream)
        if graph:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                run()
            self._run = self._graph.replay
        self._run()

    def sample(self, count: int) -> list[float]:
        """`count` times microseconds of one call."""
        return [self._once() / self.calls for _ in range(count)]

    def _once(self) -> float:
        if self._device.type != "cuda":
            start = time.perf_counter()
            self._run()
            return (time.perf_counter() - start) * 1e6
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self._run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """Samples of every arm in microseconds a call, and what two timings of the first arm differ by (A/A)."""

    us: Mapping[str, list[float]]
    spread_us: float

    def median(self, arm: str) -> float:
        return median(self.us[arm])

    @property
    def spread_pct(self) -> float:
        """The A/A difference in percent of the first arm's time."""
        return self.spread_us / self.median(next(iter(self.us))) * 100


def interleave(arms: Mapping[str, Callable[[], Stopwatch]], *, rounds: int = 3, samples: int = 7) -> Timed:
    """The first arm against itself, then all arms in turn, round by round, so that drift meets every one of them.

    The spread is the largest difference between the medians of two timings of the first arm: of the A/A before the
    others, and of any round.
    """
    base = next(iter(arms))
    watches = {name: make() for name, make in arms.items()}
    twin = arms[base]()
    apart = [abs(median(watches[base].sample(samples)) - median(twin.sample(samples)))]
    us: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, watch in watches.items():
            us[name] += watch.sample(samples)
        apart.append(abs(median(us[base][-samples:]) - median(twin.sample(samples))))
    return Timed(us=us, spread_us=max(apart))


def time_graph(run: Callable[[], Any], calls: int, *, samples: int = 20, warmups: int = 3) -> list[float]:
    """Microseconds of one call: `run` makes `calls` of them, is captured once and replayed once a sample."""
    watch = Stopwatch(run, calls, torch.device("cuda"), graph=True)
    watch.sample(warmups)
    return watch.sample(samples)


def measured(times: list[float], moved_bytes: float, flops: float = 0.0) -> dict[str, Any]:
    """The timing fields of a result row."""
    middle = median(times)
    return {
        "us": [round(t, 3) for t in times],
        "us_median": round(middle, 3),
        "floor_us": round(floor_us(moved_bytes, flops), 3),
        "gbs": round(moved_bytes / middle / 1e3, 1),
    }


def trace(arms: Mapping[str, Callable[[], Any]], device: torch.device, file: Path) -> None:
    """Run every arm once, eager, under torch.profiler and an NVTX range of its name; a Chrome trace lands in `file`."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    on_gpu = device.type == "cuda"
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for name, run in arms.items():
            with torch.profiler.record_function(name), torch.cuda.nvtx.range(name) if on_gpu else nullcontext():
                run()
                if on_gpu:
                    torch.cuda.synchronize(device)
    profile.export_chrome_trace(str(file))

"""Sends prompts to a server: so many at a time (closed loop), or at given moments whatever it does (open loop)."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anabranch.evidence.client import Client
from anabranch.evidence.record import RequestRow
from anabranch.evidence.workload import Prompt

_TICK_S = 0.01
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class LoadSpec:
    """How prompts are sent; names are those of `vllm bench serve`.

    `request_rate` requests a second, inf is all at once; `max_concurrency` bounds the open requests, None does not.
    `burstiness` is the shape of the gamma-distributed gaps: 1 is a Poisson process, larger is more even.
    """

    request_rate: float = float("inf")
    max_concurrency: int | None = None
    burstiness: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise ValueError(f"request_rate={self.request_rate}: need more than 0, or inf")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"max_concurrency={self.max_concurrency}: need at least 1")
        if not self.burstiness > 0:
            raise ValueError(f"burstiness={self.burstiness}: need more than 0")

    def moments(self, count: int) -> list[float]:
        """Seconds after the beginning at which each request is due.

        Drawn gaps are stretched so that the last request is due after `count` / `request_rate` in every draw: two arms
        and two seeds then offer the same load.
        """
        if self.request_rate == float("inf"):
            return [0.0] * count
        rng, at, moments = random.Random(self.seed), 0.0, []
        for _ in range(count):
            at += rng.gammavariate(self.burstiness, 1.0)
            moments.append(at)
        return [moment / at * count / self.request_rate for moment in moments]


@dataclass(frozen=True)
class Load:
    """Rows in the order of the prompts, and how late the client itself was (99th percentile, seconds).

    A late client measures itself: its lateness bounds what a latency here can mean.
    """

    rows: list[RequestRow]
    client_lag_s: float


async def run_load(client: Client, prompts: Sequence[Prompt], spec: LoadSpec, progress: Progress | None = None) -> Load:
    """Send all prompts and wait for every answer; failures are in the rows."""
    rows: list[RequestRow | None] = [None] * len(prompts)
    gate = asyncio.Semaphore(spec.max_concurrency or max(1, len(prompts)))
    zero, done = time.perf_counter(), 0

    async def one(index: int, due: float) -> None:
        nonlocal done
        await asyncio.sleep(zero + due - time.perf_counter())
        async with gate:
            rows[index] = await client.stream(prompts[index], index, zero)
        done += 1
        if progress is not None:
            progress(done, len(prompts))

    lags: list[float] = []
    ticker = asyncio.create_task(_tick(lags))
    try:
        async with asyncio.TaskGroup() as group:
            for index, due in enumerate(spec.moments(len(prompts))):
                group.create_task(one(index, due))
    finally:
        ticker.cancel()
    lags.sort()
    return Load([row for row in rows if row is not None], lags[int(len(lags) * 0.99)] if lags else 0.0)


async def _tick(lags: list[float]) -> None:
    """How late the event loop wakes up, again and again."""
    while True:
        due = time.perf_counter() + _TICK_S
        await asyncio.sleep(_TICK_S)
        lags.append(time.perf_counter() - due)

"""All clients of one server, phase by phase, and what the server still holds when they have gone."""

import asyncio
import json
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from soaking.bad import BAD, RARE
from soaking.exchange import Answer, Json, Target, ask, exchange, get
from soaking.good import good_jobs
from soaking.usage import Burnt


@dataclass
class Phase:
    """What good clients got in one phase, and what the engine computed for anyone while it lasted."""

    seconds: float
    start: float = field(default_factory=time.perf_counter)
    requests: int = 0
    tokens: int = 0
    in_time: float = 0.0
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    problems: Counter[str] = field(default_factory=Counter)
    bad: int = 0
    computed: int = 0
    burnt: str = ""

    @property
    def over(self) -> bool:
        return time.perf_counter() >= self.start + self.seconds

    @property
    def rate(self) -> float:
        """Tokens a second of good clients, without what came after the phase was over."""
        return self.in_time / self.seconds

    @property
    def engine_rate(self) -> float:
        """Tokens a second that the engine made, for clients of any kind."""
        return self.computed / self.seconds

    def count(self, tokens: int, began: float, answer: Answer) -> None:
        """Take one complete answer in."""
        now, end = time.perf_counter(), self.start + self.seconds
        self.requests += 1
        self.tokens += tokens
        self.in_time += tokens * max(0.0, min(now, end) - began) / (now - began)
        self.first_s.append(answer.first_s)
        self.gaps_s.append(answer.longest_gap_s)

    def line(self) -> str:
        """Counts and times on one line."""
        if not self.requests:
            return "no request succeeded"
        p99 = sorted(self.first_s)[int(0.99 * (len(self.first_s) - 1))]
        return (
            f"{self.requests} requests, {self.tokens} tokens, {self.rate:.1f} tokens/s of {self.engine_rate:.1f}, "
            f"first token p50 {statistics.median(self.first_s):.2f} s p99 {p99:.2f} s, longest gap "
            f"{max(self.gaps_s):.2f} s, bad clients {self.bad / self.seconds:.0f}/s, cores: {self.burnt}"
        )


class Load:
    """All clients of one server, whose process is `pid` if that is known."""

    def __init__(self, target: Target, *, streams: int, repeatable: bool = False, pid: int | None = None) -> None:
        self.target, self.streams, self.repeatable, self._pid = target, streams, repeatable, pid
        self.jobs = good_jobs(seed=1)
        self.answers: dict[str, tuple[int, ...]] = {}
        self.bad: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()

    async def phase(self, seconds: float, copies: int = 0, kinds: Iterable[str] = BAD) -> Phase:
        """Good clients, and `copies` of each of the bad `kinds`, until the time is over and all have their answers."""
        phase = Phase(seconds)
        clients = [self._good(phase, i) for i in range(self.streams)]
        clients += [self._bad(phase, name, i) for name in kinds for i in range(1 if name in RARE else copies) if copies]
        await asyncio.gather(self._meter(phase), *clients)
        return phase

    async def _meter(self, phase: Phase) -> None:
        before, burnt = await self._computed(), Burnt.of(self._pid)
        await asyncio.sleep(phase.seconds)
        phase.burnt = Burnt.of(self._pid).since(burnt, phase.seconds)
        phase.computed = await self._computed() - before

    async def _computed(self) -> int:
        return (await self._stats())["generation_tokens"]

    async def _good(self, phase: Phase, number: int) -> None:
        rng = random.Random(number)
        while not phase.over:
            job, began = rng.choice(self.jobs), time.perf_counter()
            answer = await exchange(self.target.port, ask(job.path, job.body))
            try:
                ids = job.tokens(answer)
            except (ValueError, KeyError, IndexError) as error:
                phase.problems[f"{job.name.partition('-')[0]}: {error}"] += 1
                await asyncio.sleep(0.1)
                continue
            if self.repeatable and self.answers.setdefault(job.name, ids) != ids:
                phase.problems[f"{job.name}: the same request got another answer"] += 1
            phase.count(len(ids), began, answer)

    async def _bad(self, phase: Phase, name: str, number: int) -> None:
        rng = random.Random(f"{name} {number}")
        await asyncio.sleep(rng.random() * min(0.5, phase.seconds / 4))
        while True:
            what = await BAD[name](self.target, rng)
            self.bad[name] += 1
            if what is not None:
                self.wrong[f"{name}: {what}"] += 1
            if phase.over:
                return
            phase.bad += 1
            await asyncio.sleep(rng.uniform(0.5, 1.0) if name in RARE else rng.uniform(0.05, 0.3))

    async def leaks(self, patience_s: float = 15.0) -> list[str]:
        """What is still held after all clients have gone and the prefix cache was emptied."""
        end = time.monotonic() + patience_s
        held = await self._held(("running", "waiting", "slots_used"))
        while held and time.monotonic() < end:
            await asyncio.sleep(0.1)
            held = await self._held(("running", "waiting", "slots_used"))
        await get(self.target.port, "/flush_cache", "POST")
        pages = await self._held(("pages_used",))
        while pages and time.monotonic() < end:
            await asyncio.sleep(0.1)
            pages = await self._held(("pages_used",))
        metrics = (await get(self.target.port, "/metrics")).decode()
        for name in ("state_slots_used", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            found = re.search(rf"^anabranch:{name}\{{.*\}} (\S+)$", metrics, re.MULTILINE)
            if found is None or float(found[1]):
                held[f"anabranch:{name}"] = found and found[1]
        return [f"at the end {name} is {value}" for name, value in {**held, **pages}.items()]

    async def _held(self, names: tuple[str, ...]) -> Json:
        stats = await self._stats()
        return {name: stats[name] for name in names if stats[name]}

    async def _stats(self) -> Json:
        return json.loads(await get(self.target.port, "/server_info"))["stats"]

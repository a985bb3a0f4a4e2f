"""Loads a server of its own with many streams and with clients that misbehave, and checks that only those notice.

    python scripts/soak.py tiny-k3 --streams 200 --seconds 60

Two phases of the same length: good clients alone, then the same with bad ones among them. Exit status 1 unless every
good request got all its tokens (the same ones each time, with --deterministic), every bad one the right status, the
good clients kept their throughput, and no slot, page, connection or memory is held at the end.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = dict[str, Any]
PATIENCE_S = 120.0
CONTEXT = 1024
# the status and a first event come before there is a token
_TOKENS = b'"token_ids":['
_USAGE = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True, "ignore_eos": True}


@dataclass
class Answer:
    """What came back on one connection; status 0 is no HTTP answer, `error` tells why."""

    status: int = 0
    body: bytes = b""
    error: str = ""
    first_s: float = 0.0
    longest_gap_s: float = 0.0

    def events(self) -> list[Json]:
        """Events of a complete stream.

        Raises:
            ValueError: the stream has no [DONE].
        """
        lines = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        if not lines or lines.pop() != "[DONE]":
            raise ValueError("no [DONE]")
        return [json.loads(line) for line in lines]


def post(path: str, body: bytes, length: int | None = None, kind: str = "application/json") -> bytes:
    """A request as bytes; `length` may lie about the body."""
    head = f"POST {path} HTTP/1.1\r\nHost: soak\r\nConnection: close\r\nContent-Type: {kind}\r\n"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


def ask(path: str, body: Mapping[str, Any]) -> bytes:
    """A request of a JSON document as bytes."""
    return post(path, json.dumps(body).encode())


async def exchange(port: int, raw: bytes, patience_s: float = PATIENCE_S, read_after_s: float = 0.0) -> Answer:
    """Send bytes and read until the server closes the connection; errors are told, not raised."""
    answer, writer = Answer(), None
    try:
        async with asyncio.timeout(patience_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            start, last = time.perf_counter(), 0.0
            writer.write(raw)
            await writer.drain()
            await asyncio.sleep(read_after_s)
            received = bytearray()
            while data := await reader.read(1 << 16):
                now = time.perf_counter()
                if last:
                    answer.longest_gap_s = max(answer.longest_gap_s, now - last)
                elif _TOKENS in data:
                    answer.first_s = now - start
                last = now if answer.first_s else 0.0
                received += data
            answer.status, answer.body = _parse(bytes(received))
    except (OSError, ValueError) as error:  # TimeoutError is an OSError
        answer.error = type(error).__name__
    finally:
        if writer is not None:
            writer.close()
    return answer


async def leave(port: int, raw: bytes, after_s: float, wait_for: int = 0) -> Answer:
    """Send bytes, read `wait_for` bytes, and go away `after_s` later."""
    answer, writer = Answer(), None
    try:
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw)
            await writer.drain()
            if wait_for:
                answer.status = int((await reader.readexactly(wait_for)).split()[1])
            await asyncio.sleep(after_s)
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        answer.error = type(error).__name__
    finally:
        if writer is not None:
            writer.transport.abort()
    return answer


def _parse(raw: bytes) -> tuple[int, bytes]:
    """Status and body, without the framing of chunks; ValueError: cut off, or no HTTP."""
    head, end, rest = raw.partition(b"\r\n\r\n")
    if not end or not head.startswith(b"HTTP/1.1 "):
        raise ValueError("no HTTP answer")
    status = int(head.split()[1])
    if b"transfer-encoding: chunked" not in head.lower():
        return status, rest
    body = bytearray()
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        count = int(size, 16)
        if not count:
            return status, bytes(body)
        body += rest[:count]
        rest = rest[count + 2 :]
    raise ValueError("the last chunk is missing")


@dataclass(frozen=True)
class Job:
    """A good request; two of one name must get the same answer."""

    name: str
    path: str
    body: Json

    def tokens(self, answer: Answer) -> tuple[int, ...]:
        """The answer's token ids.

        Raises:
            ValueError: it is not a complete answer of exactly `max_tokens`.
        """
        if answer.status != 200:
            raise ValueError(answer.error or f"status {answer.status}: {answer.body[:200].decode(errors='replace')}")
        events = answer.events()
        choices = [event["choices"][0] for event in events if event.get("choices")]
        ids = tuple(token for choice in choices for token in choice.get("token_ids") or ())
        reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        counted = events[-1]["usage"]["completion_tokens"]
        if not len(ids) == counted == self.body["max_tokens"] or reasons != ["length"]:
            raise ValueError(f"{len(ids)} ids, usage {counted}, wanted {self.body['max_tokens']}, ended by {reasons}")
        return ids


def good_jobs(seed: int) -> list[Job]:
    """Texts, token ids and conversations, short and of several pages, some with a common beginning."""
    rng, jobs = random.Random(seed), []
    common = [rng.randrange(256) for _ in range(96)]
    for i in range(24):
        options = {"max_tokens": rng.randrange(8, 40), "temperature": i % 2, "seed": i, **_USAGE}
        if i % 6 == 5:  # few: the format of the conversation alone is some 350 bytes, each a token of a tiny model
            messages = [{"role": "user", "content": f"Question {i}: " + "why? " * rng.randrange(1, 12)}]
            jobs.append(Job(f"chat-{i}", "/v1/chat/completions", {"messages": messages, **options}))
        elif i % 2 == 0:
            prompt = common[: rng.randrange(1, 97)] + [rng.randrange(256) for _ in range(rng.randrange(1, 80))]
            jobs.append(Job(f"ids-{i}", "/v1/completions", {"prompt": prompt, **options}))
        else:
            text = "".join(rng.choice("abcdefg é\u4e2d\n") for _ in range(rng.randrange(1, 150)))
            jobs.append(Job(f"text-{i}", "/v1/completions", {"prompt": text, **options}))
    return jobs


@dataclass
class Phase:
    """What good clients got in one phase."""

    seconds: float
    start: float = field(default_factory=time.perf_counter)
    requests: int = 0
    tokens: int = 0
    in_time: float = 0.0
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    problems: Counter[str] = field(default_factory=Counter)

    @property
    def over(self) -> bool:
        return time.perf_counter() >= self.start + self.seconds

    @property
    def rate(self) -> float:
        """Tokens a second, without what came after the phase was over."""
        return self.in_time / self.seconds

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
            f"{self.requests} requests, {self.tokens} tokens, {self.rate:.1f} tokens/s, first token "
            f"p50 {statistics.median(self.first_s):.2f} s p99 {p99:.2f} s, longest gap {max(self.gaps_s):.2f} s"
        )


@dataclass
class Level:
    """What the server's process holds; None where the system does not tell."""

    rss_mb: float | None = None
    files: int | None = None

    @classmethod
    def of(cls, pid: int | None) -> "Level":
        proc = Path(f"/proc/{pid}")
        if pid is None or not proc.exists():
            return cls()
        rss = re.search(r"VmRSS:\s+(\d+)", (proc / "status").read_text())
        return cls(int(rss[1]) / 1024 if rss else None, len(list((proc / "fd").iterdir())))


@dataclass
class Report:
    """Everything that was seen; `failures` judges it."""

    alone: Phase
    mixed: Phase
    bad: Counter[str]
    wrong: Counter[str]
    leaks: list[str]
    levels: dict[str, Level]
    least_ratio: float
    rss_limit_mb: float

    @property
    def ratio(self) -> float:
        return self.mixed.rate / self.alone.rate if self.alone.rate else 0.0

    def failures(self) -> list[str]:
        """One line for everything that is not as it should be."""
        found = [f"good, alone: {n} x {what}" for what, n in self.alone.problems.items()]
        found += [f"good, mixed: {n} x {what}" for what, n in self.mixed.problems.items()]
        found += [f"bad: {n} x {what}" for what, n in self.wrong.items()]
        found += [f"never tried: {name}" for name in BAD if not self.bad[name]]
        found += self.leaks
        if self.ratio < self.least_ratio:
            found.append(f"good clients kept {self.ratio:.2f} of their throughput; need {self.least_ratio:g}")
        before, after = self.levels["alone"], self.levels["end"]
        if before.rss_mb and after.rss_mb and after.rss_mb - before.rss_mb > self.rss_limit_mb:
            found.append(f"memory grew from {before.rss_mb:.0f} to {after.rss_mb:.0f} MiB beside bad clients")
        if before.files and after.files and after.files > before.files:
            found.append(f"open files grew from {before.files} to {after.files}")
        return found

    def __str__(self) -> str:
        lines = [f"alone: {self.alone.line()}", f"mixed: {self.mixed.line()}", f"mixed / alone: {self.ratio:.2f}"]
        lines += [f"bad {name}: {n}" for name, n in sorted(self.bad.items())]
        for name, level in self.levels.items():
            if level.rss_mb is not None:
                lines.append(f"after {name}: {level.rss_mb:.0f} MiB resident, {level.files} open files")
        failures = self.failures()
        return "\n".join([*lines, *(f"FAILED: {line}" for line in failures), "FAILED" if failures else "ok"])


class Load:
    """All clients of one server."""

    def __init__(self, port: int, *, streams: int, body_timeout_s: float = 30.0, repeatable: bool = False) -> None:
        self.port, self.streams, self.body_timeout_s, self.repeatable = port, streams, body_timeout_s, repeatable
        self.jobs = good_jobs(seed=1)
        self.answers: dict[str, tuple[int, ...]] = {}
        self.bad: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()

    async def phase(self, seconds: float, copies: int = 0) -> Phase:
        """Good clients, and `copies` of every bad one, until the time is over and all have their answers."""
        phase = Phase(seconds)
        clients = [self._good(phase, i) for i in range(self.streams)]
        clients += [self._bad(phase, name, i) for name in BAD for i in range(1 if name in RARE else copies) if copies]
        await asyncio.gather(*clients)
        return phase

    async def _good(self, phase: Phase, number: int) -> None:
        rng = random.Random(number)
        while not phase.over:
            job, began = rng.choice(self.jobs), time.perf_counter()
            answer = await exchange(self.port, ask(job.path, job.body))
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
            what = await BAD[name](self, rng)
            self.bad[name] += 1
            if what is not None:
                self.wrong[f"{name}: {what}"] += 1
            if phase.over:
                return
            await asyncio.sleep(rng.uniform(0.5, 1.0) if name in RARE else rng.uniform(0.05, 0.3))

    async def get(self, path: str, method: str = "GET") -> bytes:
        """Body of an answer that must be 200; ValueError otherwise."""
        head = f"{method} {path} HTTP/1.1\r\nHost: soak\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        answer = await exchange(self.port, head.encode())
        if answer.status != 200:
            raise ValueError(f"{path}: {answer.error or answer.status}")
        return answer.body

    async def leaks(self, patience_s: float = 15.0) -> list[str]:
        """What is still held after all clients have gone and the prefix cache was emptied."""
        end = time.monotonic() + patience_s
        held = await self._held(("running", "waiting", "slots_used"))
        while held and time.monotonic() < end:
            await asyncio.sleep(0.1)
            held = await self._held(("running", "waiting", "slots_used"))
        await self.get("/flush_cache", "POST")
        pages = await self._held(("pages_used",))
        while pages and time.monotonic() < end:
            await asyncio.sleep(0.1)
            pages = await self._held(("pages_used",))
        metrics = (await self.get("/metrics")).decode()
        for name in ("state_slots_used", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            found = re.search(rf"^anabranch:{name}\{{.*\}} (\S+)$", metrics, re.MULTILINE)
            if found is None or float(found[1]):
                held[f"anabranch:{name}"] = found and found[1]
        return [f"at the end {name} is {value}" for name, value in {**held, **pages}.items()]

    async def _held(self, names: tuple[str, ...]) -> Json:
        stats = json.loads(await self.get("/server_info"))["stats"]
        return {name: stats[name] for name in names if stats[name]}


Bad = Callable[[Load, random.Random], Awaitable[str | None]]
LONG: Json = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True}
SHORT: Json = {"prompt": "Hello", "max_tokens": 5, **_USAGE}


def refused(status: int, *raws: bytes, words: str = "") -> Bad:
    """A client that sends one of `raws` and must get an OpenAI error of this status."""

    async def go(load: Load, rng: random.Random) -> str | None:
        answer = await exchange(load.port, rng.choice(raws))
        if answer.status != status:
            return f"{answer.error or answer.status} instead of {status}: {answer.body[:120]!r}"
        try:
            message = json.loads(answer.body)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            return f"{status} without an error document: {answer.body[:120]!r}"
        return None if words in message else f"{status} with another message: {message}"

    return go


def leaves(after_s: tuple[float, float], body: Json, wait_for: int = 0) -> Bad:
    """A client that goes away; it must have seen status 200 if it waited for anything."""

    async def go(load: Load, rng: random.Random) -> str | None:
        answer = await leave(load.port, ask("/v1/completions", body), rng.uniform(*after_s), wait_for)
        return answer.error or (f"status {answer.status}" if answer.status not in (0, 200) else None)

    return go


def served(body: Json, read_after_s: float = 0.0) -> Bad:
    """An odd client that must be served all the same."""
    job = Job("odd", "/v1/completions", body)

    async def go(load: Load, rng: random.Random) -> str | None:
        try:
            job.tokens(await exchange(load.port, ask(job.path, body), read_after_s=read_after_s))
        except (ValueError, KeyError, IndexError) as error:
            return str(error)
        return None

    return go


async def half_a_body(load: Load, rng: random.Random) -> str | None:
    raw = json.dumps(LONG).encode()
    return (await leave(load.port, post("/v1/completions", raw[:20], len(raw)), rng.uniform(0, 0.3))).error or None


async def half_a_body_and_waits(load: Load, rng: random.Random) -> str | None:
    raw = json.dumps(LONG).encode()
    answer = await exchange(load.port, post("/v1/completions", raw[:20], len(raw)), load.body_timeout_s + 30)
    return None if answer.status == 408 else f"{answer.error or answer.status} instead of 408"


async def no_http(load: Load, rng: random.Random) -> str | None:
    answer = await exchange(load.port, rng.randbytes(200) + b"\r\n\r\n")
    return None if answer.status in (0, 400) and answer.error != "TimeoutError" else f"status {answer.status}"


def _with(**fields: Any) -> bytes:
    return ask("/v1/completions", {**LONG, **fields})


TEN_MEGABYTES = "x" * (10 << 20)
BAD: dict[str, Bad] = {
    "leaves mid-stream": leaves((0.0, 0.5), {**LONG, "stream": True}, wait_for=100),
    "leaves at once": leaves((0.0, 0.0), {**LONG, "stream": True}),
    "leaves a whole answer": leaves((0.0, 0.5), LONG),
    "leaves three answers": leaves((0.0, 0.3), {**LONG, "n": 3, "stream": True}),
    "reads late": served(SHORT, read_after_s=1.0),
    "half a body": half_a_body,
    "half a body, waits": half_a_body_and_waits,
    "ten megabytes": refused(
        400,
        _with(prompt=TEN_MEGABYTES),
        ask("/v1/chat/completions", {"messages": [{"role": "user", "content": TEN_MEGABYTES}]}),
        words="exceeds the context",
    ),
    "endless body": refused(413, post("/v1/completions", b"{", length=10**12)),
    "no UTF-8": refused(400, post("/v1/completions", b'{"prompt": "\xff\xfe\xc3"}'), words="not valid JSON"),
    "half a surrogate": refused(400, post("/v1/completions", b'{"prompt": "\\ud800"}')),
    "no JSON": refused(400, *(post("/v1/completions", raw) for raw in (b"", b"{", b"[" * 10**5, b'{"n": NaN}'))),
    "unknown fields": served({**SHORT, "colour": "blue", "user": "someone", "x": {"y": [1]}}),
    "wrong types": refused(
        400,
        _with(prompt=7),
        _with(prompt={}),
        _with(prompt=[["a"]]),
        _with(max_tokens="8"),
        _with(max_tokens=1.5),
        _with(temperature="hot"),
        _with(stream="yes"),
        _with(stop=[1]),
        post("/v1/completions", b"[]"),
        ask("/v1/chat/completions", {"messages": "hi"}),
        ask("/v1/chat/completions", {"messages": [{"role": "user", "content": 7}]}),
    ),
    "out of range": refused(
        400, _with(temperature=-1), _with(top_p=2), _with(n=0), _with(logprobs=-1), _with(top_k=-7)
    ),
    "too many tokens": refused(400, _with(max_tokens=10**6), _with(prompt=[1] * CONTEXT), _with(max_tokens=2**40)),
    "unknown tokens": refused(400, _with(prompt=[10**6]), _with(prompt=[-1])),
    "no such model": refused(404, _with(model="gpt")),
    "no such route": refused(404, ask("/v1/nothing", {})),
    "no JSON declared": refused(400, post("/v1/completions", b"{}", kind="text/plain")),
    "no HTTP": no_http,
}
# one client each, at a slower pace: they cost a bad client as much as they cost the server
RARE = ("ten megabytes", "half a body, waits")


async def soak(
    port: int,
    *,
    streams: int,
    seconds: float,
    copies: int = 1,
    body_timeout_s: float = 30.0,
    least_ratio: float = 0.5,
    rss_limit_mb: float = 256.0,
    pid: int | None = None,
) -> Report:
    """Load the server at a loopback port in both phases, `seconds` each, and look at what is left."""
    load = Load(port, streams=streams, body_timeout_s=body_timeout_s)
    load.repeatable = bool(json.loads(await load.get("/server_info"))["deterministic"])
    levels = {"start": Level.of(pid)}
    await load.phase(min(2.0, seconds / 4))  # the first steps allocate
    levels["warming up"] = Level.of(pid)
    alone = await load.phase(seconds)
    levels["alone"] = Level.of(pid)
    mixed = await load.phase(seconds, copies)
    leaks = await load.leaks()
    await asyncio.sleep(0.5)  # closed connections leave the server's table
    levels["end"] = Level.of(pid)
    return Report(alone, mixed, load.bad, load.wrong, leaks, levels, least_ratio, rss_limit_mb)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="directory, e.g. of anabranch init-checkpoint k3")
    parser.add_argument("--streams", type=int, default=200, help="good clients at once (200)")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each of the two phases (60)")
    parser.add_argument("--copies", type=int, default=2, help="clients of each bad kind (2)")
    parser.add_argument("--max-seqs", type=int, help="answers computed at once (as many as streams)")
    parser.add_argument("--deterministic", action="store_true", help="also compare the answers to equal requests")
    parser.add_argument("--least-ratio", type=float, default=0.3, help="throughput that good clients must keep (0.3)")
    parser.add_argument("--rss-limit-mb", type=float, default=256.0, help="growth allowed beside bad clients (256)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server ends with us
    command = [
        sys.executable,
        "-c",
        "from anabranch.cli.main import run; run()",
        "serve",
        args.checkpoint,
        "--port",
        "0",
    ]
    command += ["--max-seqs", str(args.max_seqs or args.streams), "--max-len", str(CONTEXT), "--prefill-chunk", "256"]
    command += ["--deterministic"] if args.deterministic else []
    # more threads than that only wait for each other at this size
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as server,
    ):
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            found = re.search(r"serving at http://127\.0\.0\.1:(\d+)/v1", line)
            if found is None:
                log.seek(0)
                print(f"the server did not start: {log.read().strip()}", file=sys.stderr)
                return 1
            options = {"streams": args.streams, "seconds": args.seconds, "copies": args.copies}
            options |= {"least_ratio": args.least_ratio, "rss_limit_mb": args.rss_limit_mb, "pid": server.pid}
            report = asyncio.run(soak(int(found[1]), **options))
            log.seek(0)
            report.leaks += [f"the server logged {n} tracebacks" for n in [log.read().count("Traceback")] if n]
            print(report)
            return 1 if report.failures() else 0
        finally:
            server.kill()


if __name__ == "__main__":
    sys.exit(main())

"""The soak test in short, against a real server; and against servers that do what it must notice."""

import asyncio
import functools
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from server import conftest
from server.conftest import Live

from anabranch.engine.llm import LLM

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import soak
from soaking import bad, exchange, good, load, report, usage

BODY_TIMEOUT_S = 1.0


def test_nobody_else_notices_bad_clients(checkpoints):
    with Live(checkpoints["k3"], body_timeout_s=BODY_TIMEOUT_S) as live:
        # four slots for all: eight good clients queue, and bad ones that leave give way at once. Two seconds beside
        # other tests, in one process, measure nothing
        target, least = exchange.Target(live.port, BODY_TIMEOUT_S), dict.fromkeys(soak.LEAST, 0.1)
        seen = asyncio.run(soak.soak(target, streams=8, seconds=2, least=least, pid=os.getpid()))
        print(seen)
        assert seen.failures() == []
        for [phase] in seen.phases.values():
            assert phase.requests > 3
            assert phase.computed > 0
        assert seen.phases["alone"][0].bad == 0
        assert min(seen.phases["refused"][0].bad, seen.phases["mixed"][0].bad) > 10
        assert live.idle()
        stats = live.service.stats()
        assert (stats["pages_used"], stats["nonfinite"]) == (0, 0)
        assert stats["finished"]["abort"] > 5


def test_answers_do_not_depend_on_who_else_asks(checkpoints, monkeypatch):
    monkeypatch.setattr(conftest, "LLM", functools.partial(LLM, deterministic=True))
    with Live(checkpoints["kl"], body_timeout_s=BODY_TIMEOUT_S) as live:
        clients = load.Load(exchange.Target(live.port, BODY_TIMEOUT_S), streams=6, repeatable=True)
        clients.jobs = [job for job in clients.jobs if job.path == "/v1/completions"][:6]
        phase = asyncio.run(clients.phase(2.0, copies=1))
        assert phase.problems == Counter()
        assert phase.requests > len(clients.answers) > 1, "no request was repeated"
        clients.answers = dict.fromkeys(clients.answers, (-1,))
        assert asyncio.run(clients.phase(0.1)).problems


def test_clients_that_are_refused_never_reach_the_engine(checkpoints):
    with Live(checkpoints["k3"], body_timeout_s=BODY_TIMEOUT_S) as live:
        clients = load.Load(exchange.Target(live.port, BODY_TIMEOUT_S), streams=0)
        asyncio.run(clients.phase(1.5, 1, bad.REFUSED))
        assert set(clients.bad) == set(bad.REFUSED)
        assert clients.wrong == Counter()
        stats = live.service.stats()
        assert (stats["finished"], stats["prefix_queries"]) == ({}, 0)


class Scripted:
    """A server that answers every request with the same bytes, and says that it holds `stats`."""

    def __init__(self, answer: bytes, **stats: int):
        held = dict.fromkeys(("running", "waiting", "slots_used", "pages_used", "generation_tokens"), 0) | stats
        self.answer, self.info = answer, json.dumps({"deterministic": False, "stats": held}).encode()
        self.metrics = f'anabranch:state_slots_used{{model_name="x"}} {held["slots_used"]}.0\n'.encode()

    async def reply(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        path = head.split()[1]
        documents = {b"/server_info": self.info, b"/metrics": self.metrics, b"/flush_cache": b"{}"}
        found = documents.get(path)
        writer.write(self.answer if found is None else b"HTTP/1.1 200 OK\r\n\r\n" + found)
        await writer.drain()
        writer.close()

    def run(self, use):
        async def go():
            async with await asyncio.start_server(self.reply, "127.0.0.1", 0) as server:
                return await use(server.sockets[0].getsockname()[1])

        return asyncio.run(go())


def stream(count: int, counted: int, reason: str = "length", end: str = "data: [DONE]\n\n") -> bytes:
    token = {"choices": [{"token_ids": [1], "finish_reason": None}]}
    last = {"choices": [{"token_ids": [1], "finish_reason": reason}]}
    usage = {"choices": [], "usage": {"completion_tokens": counted}}
    events = "".join(f"data: {json.dumps(event)}\n\n" for event in [token] * (count - 1) + [last, usage]) + end
    return b"HTTP/1.1 200 OK\r\n\r\n" + events.encode()


JOB = good.Job("it", "/v1/completions", {"max_tokens": 3})


def tokens_of(answer: bytes) -> tuple[int, ...]:
    return JOB.tokens(Scripted(answer).run(lambda port: exchange.exchange(port, exchange.ask(JOB.path, JOB.body), 5)))


def test_a_right_answer_is_taken():
    assert tokens_of(stream(3, 3)) == (1, 1, 1)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (stream(2, 2), "2 ids, usage 2, wanted 3"),
        (stream(3, 2), "3 ids, usage 2"),
        (stream(3, 3, reason="stop"), "ended by"),
        (stream(3, 3, end=""), r"no \[DONE\]"),
        (b"HTTP/1.1 429 Too Many Requests\r\n\r\nfull", "status 429: full"),
        (b"", "ValueError"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", "ValueError"),
    ],
)
def test_a_wrong_answer_is_noticed(answer, words):
    with pytest.raises(ValueError, match=words):
        tokens_of(answer)


def test_a_server_that_takes_everything_is_noticed():
    """Every kind of bad client that wants a refusal complains of status 200, and good ones of the count."""

    async def use(port: int):
        clients = load.Load(exchange.Target(port, 0.2), streams=2)
        return clients, await clients.phase(1.0, copies=1)

    clients, phase = Scripted(stream(3, 3)).run(use)
    unlike = {"leaves mid-stream", "leaves at once", "leaves a whole answer", "leaves three answers", "half a body"}
    assert {what.partition(":")[0] for what in clients.wrong} == set(bad.BAD) - unlike
    assert phase.requests == 0
    assert phase.problems


def test_what_is_held_at_the_end_is_told():
    server = Scripted(b"", slots_used=2, pages_used=7)
    leaks = server.run(lambda port: load.Load(exchange.Target(port), streams=1).leaks(0.2))
    assert "at the end slots_used is 2" in leaks
    assert "at the end pages_used is 7" in leaks
    assert "at the end anabranch:state_slots_used is 2.0" in leaks


def _report(alone: float, refused: float, mixed: float, engine: float = 100, rss_mb: float = 110, **more):
    phases = {
        name: [load.Phase(1.0, requests=1, in_time=rate, computed=computed)]
        for name, rate, computed in (("alone", alone, 100), ("refused", refused, 100), ("mixed", mixed, engine))
    }
    levels = {"alone": usage.Level(100, 9), "end": usage.Level(rss_mb, more.pop("files", 9))}
    options = {"bad": Counter(bad.BAD.keys()), "wrong": Counter(), "leaks": [], **more}
    return report.Report(phases, levels=levels, least=soak.LEAST, rss_limit_mb=64, **options)


def test_a_good_report_has_no_failures():
    assert _report(100, 95, 85).failures() == []


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (_report(100, 89, 85), "beside clients that are refused, good clients kept 0.89 of the throughput; need 0.9"),
        (_report(100, 95, 79), "beside bad clients of every kind, good clients kept 0.79"),
        (_report(100, 95, 85, engine=80), "the engine kept 0.80"),
        (_report(0, 0, 0), "kept 0.00"),
        (_report(100, 95, 90, rss_mb=200), "memory grew from 100 to 200"),
        (_report(100, 95, 90, files=10), "open files grew"),
        (_report(100, 95, 90, bad=Counter()), "never tried: ten megabytes"),
        (_report(100, 95, 90, wrong=Counter({"no HTTP: status 200": 2})), "bad: 2 x no HTTP"),
        (_report(100, 95, 90, leaks=["at the end running is 1"]), "running is 1"),
    ],
)
def test_a_bad_report_fails(seen, words):
    assert any(words in line for line in seen.failures())


def test_medians_count_over_rounds():
    seen = _report(100, 95, 85)
    seen.phases["refused"] = [load.Phase(1.0, requests=1, in_time=rate) for rate in (10, 95, 99)]
    assert seen.ratio("refused") == pytest.approx(0.95)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
def test_what_is_burnt_is_measured():
    before = usage.Burnt.of(os.getpid())
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    found = dict(part.rsplit(" ", 1) for part in usage.Burnt.of(os.getpid()).since(before, 1.0).split(", "))
    assert float(found["server"]) == pytest.approx(float(found["clients"]), abs=0.15)
    assert float(found["clients"]) >= 0.29
    level = usage.Level.of(os.getpid())
    assert level.rss_mb > 50
    assert level.files > 2
    assert usage.Level.of(None) == usage.Level()

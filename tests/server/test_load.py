"""The soak test in short, against a real server; and against servers that do what it must notice."""

import asyncio
import functools
import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from server import conftest
from server.conftest import Live

from anabranch.engine.llm import LLM


def _load_script():
    path = Path(__file__).parents[2] / "scripts" / "soak.py"
    spec = importlib.util.spec_from_file_location("soak", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


soak = _load_script()
BODY_TIMEOUT_S = 1.0


def test_nobody_else_notices_bad_clients(checkpoints):
    with Live(checkpoints["k3"], body_timeout_s=BODY_TIMEOUT_S) as live:
        # four slots for all: eight good clients queue, and bad ones that leave give way at once
        run = soak.soak(live.port, streams=8, seconds=2, body_timeout_s=BODY_TIMEOUT_S, least_ratio=0.2)
        report = asyncio.run(run)
        print(report)
        assert report.failures() == []
        assert report.mixed.requests > 3
        assert live.idle()
        stats = live.service.stats()
        assert (stats["pages_used"], stats["nonfinite"]) == (0, 0)
        assert stats["finished"]["abort"] > 5


def test_answers_do_not_depend_on_who_else_asks(checkpoints, monkeypatch):
    monkeypatch.setattr(conftest, "LLM", functools.partial(LLM, deterministic=True))
    with Live(checkpoints["kl"], body_timeout_s=BODY_TIMEOUT_S) as live:
        load = soak.Load(live.port, streams=6, body_timeout_s=BODY_TIMEOUT_S, repeatable=True)
        load.jobs = [job for job in load.jobs if job.path == "/v1/completions"][:6]
        phase = asyncio.run(load.phase(2.0, copies=1))
        assert phase.problems == Counter()
        assert phase.requests > len(load.answers) > 1, "no request was repeated"
        load.answers = dict.fromkeys(load.answers, (-1,))
        assert asyncio.run(load.phase(0.1)).problems


class Scripted:
    """A server that answers every request with the same bytes, and says that it holds `stats`."""

    def __init__(self, answer: bytes, **stats: int):
        held = {"running": 0, "waiting": 0, "slots_used": 0, "pages_used": 0, **stats}
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


JOB = soak.Job("it", "/v1/completions", {"max_tokens": 3})


def tokens_of(answer: bytes) -> tuple[int, ...]:
    return JOB.tokens(Scripted(answer).run(lambda port: soak.exchange(port, soak.ask(JOB.path, JOB.body), 5)))


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
        load = soak.Load(port, streams=2, body_timeout_s=0.2)
        return load, await load.phase(1.0, copies=1)

    load, phase = Scripted(stream(3, 3)).run(use)
    unlike = {"leaves mid-stream", "leaves at once", "leaves a whole answer", "leaves three answers", "half a body"}
    assert {what.partition(":")[0] for what in load.wrong} == set(soak.BAD) - unlike
    assert phase.requests == 0
    assert phase.problems


def test_what_is_held_at_the_end_is_told():
    leaks = Scripted(b"", slots_used=2, pages_used=7).run(lambda port: soak.Load(port, streams=1).leaks(0.2))
    assert "at the end slots_used is 2" in leaks
    assert "at the end pages_used is 7" in leaks
    assert "at the end anabranch:state_slots_used is 2.0" in leaks


def _report(alone: float, mixed: float, rss_mb: float = 110, files: int = 9, **more):
    phases = [soak.Phase(1.0, requests=1, in_time=rate) for rate in (alone, mixed)]
    levels = {"alone": soak.Level(100, 9), "end": soak.Level(rss_mb, files)}
    options = {"bad": Counter(soak.BAD.keys()), "wrong": Counter(), "leaks": [], **more}
    return soak.Report(*phases, levels=levels, least_ratio=0.5, rss_limit_mb=64, **options)


def test_a_good_report_has_no_failures():
    assert _report(100, 60).failures() == []


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (_report(100, 40), "kept 0.40 of their throughput"),
        (_report(0, 0), "kept 0.00"),
        (_report(100, 90, rss_mb=200), "memory grew from 100 to 200"),
        (_report(100, 90, files=10), "open files grew"),
        (_report(100, 90, bad=Counter()), "never tried: ten megabytes"),
        (_report(100, 90, wrong=Counter({"no HTTP: status 200": 2})), "bad: 2 x no HTTP"),
        (_report(100, 90, leaks=["at the end running is 1"]), "running is 1"),
    ],
)
def test_a_bad_report_fails(report, words):
    assert any(words in line for line in report.failures())

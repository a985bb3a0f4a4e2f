"""The client against servers with known times, and streams cut anywhere."""

import asyncio
import json
import time
from itertools import pairwise

import pytest
from helpers.scripted import Running, Script
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.evidence.answer import AnswerReader
from anabranch.evidence.client import Client, ClientSpec
from anabranch.evidence.load import LoadSpec, run_load
from anabranch.evidence.metrics import measure, problems
from anabranch.evidence.record import RequestRow
from anabranch.evidence.sse import EventParser
from anabranch.evidence.workload import Prompt

PROMPT = Prompt(ids=(1, 2, 3), max_tokens=8)
STREAM = 'data: {"a": "é"}\n\n: note\r\ndata: one\r\ndata: two\r\n\r\nevent: x\rdata:3\r\rid: 7\n\ndata: [DONE]\n\n'


def ask(url, prompts, load=None, probe=True, **spec):
    async def go():
        async with Client(ClientSpec(base_url=url, **spec)) as client:
            manners = await client.probe(prompts[0]) if probe else None
            return await run_load(client, prompts, load or LoadSpec(max_concurrency=1)), manners

    return asyncio.run(go())


@given(st.lists(st.integers(1, len(STREAM.encode())), max_size=40), st.booleans())
def test_events_do_not_depend_on_how_bytes_are_cut(cuts, bom):
    raw = (b"\xef\xbb\xbf" if bom else b"") + STREAM.encode()
    edges = [0, *sorted(set(cuts)), len(raw)]
    parser = EventParser()
    found = [event for a, b in pairwise(edges) for event in parser.feed(raw[a:b])]
    assert found == ['{"a": "é"}', "one\ntwo", "3", "[DONE]"]


@given(st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=1, max_size=6), st.data())
@settings(max_examples=50)
def test_tokens_are_counted_by_ids_whatever_the_chunks_and_cuts(groups, data):
    chunks = [{"choices": [{"text": "x", "token_ids": ids, "finish_reason": None}]} for ids in groups]
    chunks[-1]["choices"][0]["finish_reason"] = "stop"
    raw = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw) - 1), max_size=8)))
    reader = AnswerReader(RequestRow(index=0, start_s=0.0))
    for now, (a, b) in enumerate(zip([0, *cuts], [*cuts, len(raw)], strict=True)):
        reader.feed(raw[a:b], float(now))
    row = reader.finish()
    assert row.error is None
    assert row.token_ids == [id_ for ids in groups for id_ in ids]
    assert sum(row.counts) == row.output_tokens == len(row.token_ids)
    assert len(row.itl_s) == row.output_tokens - (row.counts[0] if row.counts else 0)
    assert row.arrivals == sorted(row.arrivals)


def test_times_are_those_of_the_server():
    with Running(ttft=0.2, tpot=0.05) as server:
        load, manners = ask(server.url, [PROMPT] * 4, LoadSpec(max_concurrency=2))
        assert server.app.most_open == 2
    figures = measure([load.rows])
    assert manners.basis == "ids"
    assert (figures["completed"], figures["failed"]) == (4, 0)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (12, 32)
    # never early, and late by what a busy machine costs
    for name, ms in (("ttft", 200), ("tpot", 50), ("itl", 50), ("e2el", 550)):
        assert ms * 0.98 <= figures[f"median_{name}_ms"] <= ms + 40, name
    assert 1.1 <= figures["duration"] <= 1.5
    assert figures["output_throughput"] == pytest.approx(32 / figures["duration"])


@pytest.mark.parametrize("group", [3, 8])
def test_tokens_that_come_together_are_not_one_token(group):
    with Running(ttft=0.03, tpot=0.03, group=group) as server:
        load, _ = ask(server.url, [PROMPT])
    row = load.rows[0]
    assert row.output_tokens == sum(row.counts) == 8
    assert len(row.counts) == -(-8 // group)
    assert len(row.itl_s) == 8 - group if group < 8 else row.itl_s == []
    if group == 3:
        assert 28 <= measure([load.rows])["median_itl_ms"] <= 50


@pytest.mark.parametrize(("script", "basis", "itls"), [
    (Script(token_ids=False), "usage", 7),
    (Script(token_ids=False, running_usage=False), "total", 0),
    (Script(token_ids=False, strict=True), "total", 0),
])  # fmt: skip
def test_servers_that_tell_less(script, basis, itls):
    with Running(script) as server:
        load, manners = ask(server.url, [PROMPT])
    assert manners.basis == basis
    assert manners.ignore_eos != script.strict
    row = load.rows[0]
    assert (row.ok, row.output_tokens, len(row.itl_s)) == (True, 8, itls)
    assert row.tpot_s is not None
    assert any("ITL" in line for line in problems(load.rows)) == (basis == "total")


def test_chat():
    with Running() as server:
        load, _ = ask(server.url, [Prompt(text="how are you", max_tokens=5)], backend="openai-chat")
        assert server.app.bodies[-1]["messages"] == [{"role": "user", "content": "how are you"}]
    assert (load.rows[0].input_tokens, load.rows[0].output_tokens) == (3, 5)


def test_failures_are_rows():
    with Running(Script(fail={1}, cut={2})) as server:
        load, _ = ask(server.url, [PROMPT] * 4, probe=False, model="scripted")
    errors = [row.error for row in load.rows]
    assert errors[0] is errors[3] is None
    assert "status 500" in errors[1]
    assert "planted" in errors[1]
    assert "finish_reason" in errors[2]
    figures = measure([load.rows])
    assert (figures["completed"], figures["failed"], figures["total_output_tokens"]) == (2, 2, 16)


def test_a_busy_server_is_asked_again_and_its_time_counts():
    with Running(Script(busy={0, 1}, ttft=0.0)) as server:
        load, _ = ask(server.url, [PROMPT], probe=False, model="scripted", retries=2)
        refused, _ = ask(server.url, [PROMPT], probe=False, model="scripted")
    assert (load.rows[0].ok, load.rows[0].retries) == (True, 2)
    assert load.rows[0].ttft_s > 0.5
    assert refused.rows[0].retries == 0


def test_nobody_there():
    load, _ = ask("http://127.0.0.1:9", [PROMPT], probe=False, model="x")
    assert "Connect" in load.rows[0].error
    with pytest.raises(ValueError, match="names no model"):
        ask("http://127.0.0.1:9", [PROMPT])


def test_an_open_loop_does_not_wait_for_answers():
    spec = LoadSpec(request_rate=20, seed=3)
    moments = spec.moments(10)
    assert moments == sorted(moments)
    assert moments[-1] == pytest.approx(0.5)
    assert len({round(b - a, 6) for a, b in pairwise(moments)}) == 9
    assert spec.moments(10) == moments != LoadSpec(request_rate=20, seed=4).moments(10)
    even = LoadSpec(request_rate=20, burstiness=1e6).moments(10)
    assert all(b - a == pytest.approx(0.05, rel=0.05) for a, b in pairwise(even))
    with Running(ttft=0.6, tpot=0.0) as server:
        start = time.perf_counter()
        load, _ = ask(server.url, [PROMPT] * 10, spec, probe=False, model="scripted")
        assert time.perf_counter() - start < 2.5
        assert server.app.most_open > 5
    for row, moment in zip(load.rows, moments, strict=True):
        assert moment <= row.start_s <= moment + 0.15


@pytest.mark.parametrize(("change", "words"), [
    ({"base_url": "localhost:1"}, "http://HOST:PORT"),
    ({"base_url": "http://a", "backend": "grpc"}, "openai, openai-chat"),
])  # fmt: skip
def test_bad_specs(change, words):
    with pytest.raises(ValueError, match=words):
        ClientSpec(**change)
    for name, value in (("request_rate", 0), ("max_concurrency", 0), ("burstiness", 0)):
        with pytest.raises(ValueError, match=name):
            LoadSpec(**{name: value})

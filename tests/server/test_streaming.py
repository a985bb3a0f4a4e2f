"""Framing of events, and what happens when clients leave."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server.events import chunks, events, events_by_splitlines
from server.fakes import HANG, FakeService, Site, spell

from anabranch.server.streaming import DONE, EventStream, frame

TEXT = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("\r\n\x85\u2028\u2029\x0b\x0c\x1c:"))
)
AWKWARD = st.one_of(TEXT, st.sampled_from(["data: [DONE]\n\n", "\n\ndata:", "data:", "\r\n\r\n", "\x00", "event: x\n"]))


@given(st.lists(st.dictionaries(AWKWARD, AWKWARD, max_size=3), max_size=4))
@settings(max_examples=150, deadline=None)
def test_any_text_survives_framing(documents):
    raw = b"".join(map(frame, documents)) + DONE
    assert [json.loads(event) for event in events(raw)[:-1]] == documents
    assert events_by_splitlines(raw) == events(raw)
    assert raw.count(b"\n") == 2 * len(documents) + 2


def test_readable_text_stays_readable():
    assert "你好" in frame({"text": "你好"}).decode()


@given(st.lists(AWKWARD, min_size=1, max_size=4))
@settings(max_examples=25, deadline=None)
def test_any_answer_survives_the_server(pieces):
    site = Site(FakeService(script=spell(*pieces)))
    found = chunks(site.complete(stream=True).content)
    assert "".join(c["choices"][0]["text"] for c in found) == "".join(pieces)
    assert site.complete().json()["choices"][0]["text"] == "".join(pieces)


def test_every_chunk_has_the_same_head():
    found = chunks(Site(FakeService(script=spell("a", "b", "c"))).complete(stream=True).content)
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in found}) == 1
    assert [c["choices"][0]["finish_reason"] for c in found] == [None, None, "stop"]
    assert all("usage" not in c for c in found)


def test_headers_of_a_stream():
    response = Site().complete(stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert "content-length" not in response.headers


@pytest.mark.parametrize("path", ["complete", "chat"])
def test_usage_comes_last_and_alone(path):
    site = Site(FakeService("kl", spell("ab", "c")))
    found = chunks(getattr(site, path)(stream=True, stream_options={"include_usage": True}).content)
    assert found[-1]["choices"] == []
    assert found[-1]["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert all(c["usage"] is None for c in found[:-1])


def test_continuous_usage_counts_up():
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = chunks(Site(FakeService(script=spell("ab", "c"))).complete(stream=True, stream_options=options).content)
    assert [c["usage"]["completion_tokens"] for c in found] == [2, 3, 3]


def test_an_error_in_a_stream_is_the_last_frame():
    broken = [*spell("ab", reason=None), *spell("", reason="error", error="non-finite logits")]
    raw = Site(FakeService(script=broken)).complete(stream=True).content
    first, last = map(json.loads, events(raw))
    assert first["choices"][0]["text"] == "ab"
    assert last["error"]["message"] == "non-finite logits"
    assert last["error"]["type"] == "server_error"


def test_a_bug_in_a_stream_is_told_too():
    raw = Site(FakeService(script=[*spell("ab", reason=None), ZeroDivisionError()])).complete(stream=True).content
    assert json.loads(events(raw)[-1])["error"]["message"] == "internal error: ZeroDivisionError"


def test_a_time_limit_ends_streams_and_answers():
    site = Site(FakeService(script=[*spell("ab", reason=None), HANG]), request_timeout_s=0.05)
    last = json.loads(events(site.complete(stream=True).content)[-1])
    assert (last["error"]["type"], last["error"]["code"]) == ("timeout_error", "timeout")
    assert site.complete().status_code == 504
    assert (site.service.aborted, site.app.state.desk.in_progress) == (2, 0)


async def _leave(site: Site, body: dict, after: str) -> list[dict]:
    """Talks to the app directly: sends the request, and disconnects once a message of type `after` was sent."""
    sent, leaving = [], asyncio.Event()
    requests = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])

    async def receive():
        for message in requests:
            return message
        if after == "nothing":
            await asyncio.sleep(0.05)
        else:
            await leaving.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)
        if message["type"] == after and (message.get("body") or after.endswith("start")):
            leaving.set()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    await asyncio.wait_for(site.app(scope, receive, send), 5)
    return sent


@pytest.mark.parametrize(
    ("stream", "after"),
    [(False, "nothing"), (True, "nothing"), (True, "http.response.start"), (True, "http.response.body")],
)
def test_a_client_that_leaves_frees_its_answers(stream, after):
    site = Site(FakeService(script=[*spell("ab", reason=None), HANG]))
    asyncio.run(_leave(site, {"prompt": ["a", "b"], "stream": stream, "n": 2}, after))
    assert (site.service.aborted, site.app.state.desk.in_progress) == (4, 0)


def test_a_response_that_never_starts_is_closed():
    closed = []

    async def never():
        yield b""

    async def fail(_):
        raise OSError("the socket is gone")

    with pytest.raises(OSError, match="gone"):
        asyncio.run(EventStream(never(), lambda: closed.append(True))({}, fail, fail))
    assert closed == [True]


def test_a_finished_answer_is_not_aborted():
    site = Site()
    assert site.complete().status_code == 200
    assert site.complete(stream=True).status_code == 200
    assert (site.service.aborted, site.app.state.desk.in_progress) == (0, 0)

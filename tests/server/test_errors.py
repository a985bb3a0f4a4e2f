"""Every way in that must be refused, in OpenAI's form."""

import asyncio
import logging

import httpx
import pytest
from server.fakes import HANG, FakeService, Site, refused

from anabranch.server import protocol
from anabranch.server.settings import ServerSettings

JSON = {"content-type": "application/json"}


def raw(site: Site, content, **headers) -> httpx.Response:
    return site.ask("POST", "/v1/completions", content=content, headers={**JSON, **headers})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"nonsense",
        b"\xff\xfe",
        b'{"prompt": "\xc3\x28"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "hi", "temperature": NaN}',
        b'{"prompt": "hi", "temperature": 1e999}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b'{"prompt": "hi"} trailing',
        b"[]",
        b"null",
        b'"text"',
        b"{}",
    ],
)
def test_bodies_that_are_no_request(content):
    refused(raw(Site(), content), 400, param=raw(Site(), content).json()["error"]["param"])


def test_a_message_quotes_nothing_that_json_cannot_hold():
    assert raw(Site(), b'{"prompt": "hi", "model": "caf\xc3\xa9\\u0000"}').status_code == 404


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x"])
def test_another_content_type(kind):
    response = Site().ask("POST", "/v1/completions", content=b'{"prompt": "hi"}', headers={"content-type": kind})
    refused(response, 400, "need application/json")


def test_json_with_a_charset():
    response = raw(Site(), b'{"prompt": "hi"}', **{"content-type": "application/json; charset=utf-8"})
    assert response.status_code == 200


def test_a_body_too_large_by_its_own_word():
    response = raw(Site(max_body_bytes=100), b'{"prompt": "' + b"x" * 100 + b'"}')
    refused(response, 413, "exceeds 100 bytes")
    assert response.headers["connection"] == "close"


def test_a_body_too_large_while_it_arrives():
    read = 0

    async def forever():
        nonlocal read
        while True:
            read += 1
            yield b"x" * 30

    refused(raw(Site(max_body_bytes=100), forever()), 413, "exceeds 100 bytes")
    assert read <= 5


def test_a_body_that_does_not_come():
    async def half():
        yield b'{"prompt"'
        await asyncio.sleep(5)

    refused(raw(Site(body_timeout_s=0.05), half()), 408, "did not arrive within 0.05 s")


def test_a_text_that_cannot_fit_is_not_even_encoded(monkeypatch):
    site = Site()
    monkeypatch.setattr(type(site.service.tokenizer), "encode", lambda *_, **__: pytest.fail("encoded"))
    text = "x" * (1 << 20)
    error = refused(site.complete(prompt=["a" * (1 << 20)]), 400, "exceeds the context of 2000", param="prompt")
    assert error["code"] == "context_length_exceeded"
    refused(site.chat(messages=[{"role": "user", "content": text}]), 400, "exceeds", param="messages[0]")


def test_unknown_places():
    site = Site()
    refused(site.ask("GET", "/nope"), 404, "GET /nope")
    response = site.ask("GET", "/v1/completions")
    refused(response, 405, "GET /v1/completions")
    assert response.headers["allow"] == "POST"
    error = refused(site.complete(model="gpt"), 404, "'gpt' does not exist", "tiny-k3", param="model")
    assert error["code"] == "model_not_found"
    refused(site.chat(model="gpt"), 404, param="model")


def test_the_served_name_is_the_one_asked_for():
    site = Site(served_model_name="kimi")
    assert site.complete(model="kimi").json()["model"] == "kimi"
    refused(site.complete(model="tiny-k3"), 404, param="model")


def test_the_key():
    site = Site(api_key="secret")
    for headers in ({}, {"authorization": "secret"}, {"authorization": "Bearer Secret"}, {"authorization": "Basic x"}):
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/openapi.json")):
            response = site.ask(method, path, headers=headers)
            assert refused(response, 401, "API key")["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
    good = {"authorization": "Bearer secret"}
    assert site.ask("GET", "/v1/models", headers=good).status_code == 200
    assert site.ask("GET", "/health").status_code == site.ask("GET", "/metrics").status_code == 200
    shown = site.app.state.settings.public()
    assert (shown["api_key_set"], "secret" in str(shown)) == (True, False)


def test_a_full_queue():
    site = Site(max_queue=2)
    site.service.full = True
    response = site.complete()
    assert refused(response, 429, "waiting already")["code"] == "queue_full"
    assert response.headers["retry-after"] == "1"
    assert site.app.state.desk.in_progress == 0
    # 4 slots and 2 that wait
    refused(site.complete(n=7), 400, "this server takes 6")


def test_more_answers_than_there_is_room_for():
    site = Site(FakeService(script=[HANG]), max_queue=0, request_timeout_s=0.3)

    async def go():
        transport = httpx.ASGITransport(site.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"prompt": "hi", "n": 3}
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(2)))

    assert sorted(r.status_code for r in asyncio.run(go())) == [429, 504]
    assert site.app.state.desk.in_progress == 0


def test_all_or_none_of_several_prompts():
    site = Site()
    refused(site.complete(prompt=["a", "b", ""]), 400, "no tokens")
    assert (site.service.aborted, site.app.state.desk.in_progress) == (2, 0)


def test_shutting_down():
    site = Site(FakeService(script=[HANG]))

    async def drain_while_one_runs():
        transport = httpx.ASGITransport(site.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            running = asyncio.create_task(client.post("/v1/completions", json={"prompt": "hi"}))
            while not site.app.state.desk.in_progress:
                await asyncio.sleep(0.01)
            await site.app.state.desk.drain()
            health = await client.get("/health")
            late = await client.post("/v1/completions", json={"prompt": "hi"})
            running.cancel()
            return health, late

    health, late = asyncio.run(drain_while_one_runs())
    refused(health, 503, "shutting down")
    refused(late, 503, "shutting down")
    assert site.service.drained


def test_a_failed_engine_is_told_everywhere():
    site = Site()
    site.service.failure = "no pages"
    for response in (site.ask("GET", "/health"), site.complete(), site.chat()):
        assert refused(response, 503, "engine failed: no pages")["code"] == "engine_error"


def test_a_bug_is_500_and_names_no_secret():
    site = Site(FakeService(script=[ZeroDivisionError("/home/me/secret")]))
    error = refused(site.complete(), 500, "internal error: ZeroDivisionError")
    assert "secret" not in error["message"]


def test_unknown_fields_are_logged_once(caplog):
    protocol._logged.clear()
    site = Site()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert site.complete(user="me", **{"x\ny": 1}).status_code == 200
    assert [record.message for record in caplog.records] == [
        "ignoring the unknown request field 'user'",
        "ignoring the unknown request field 'x\\ny'",
    ]
    for i in range(3 * protocol._LOGGED_NAMES):
        site.complete(**{f"field{i}": 1}) if i % 50 == 0 else None
    assert len(protocol._logged) <= protocol._LOGGED_NAMES


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70000},
        {"api_key": ""},
        {"api_key": "schlüssel"},
        {"parser": "qwen"},
        {"max_body_bytes": 0},
        {"body_timeout_s": 0},
        {"body_timeout_s": float("nan")},
        {"max_queue": -1},
        {"request_timeout_s": 0},
        {"drain_s": -1},
        {"served_model_name": ""},
    ],
)
def test_settings_out_of_range(wrong):
    [(name, value)] = wrong.items()
    with pytest.raises(ValueError, match=f"^{name}.*need ") as caught:
        ServerSettings(**wrong)
    assert name != "api_key" or not value or value not in str(caught.value)

"""Clients that misbehave, and what each must get: some are refused before the engine hears of them, some admitted."""

import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

from soaking.exchange import Json, Target, ask, exchange, leave, post
from soaking.good import USAGE, Job

Bad = Callable[[Target, random.Random], Awaitable[str | None]]
CONTEXT = 1024
LONG: Json = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True}
SHORT: Json = {"prompt": "Hello", "max_tokens": 5, **USAGE}


def refused(status: int, *raws: bytes, words: str = "") -> Bad:
    """A client that sends one of `raws` and must get an OpenAI error of this status."""

    async def go(target: Target, rng: random.Random) -> str | None:
        answer = await exchange(target.port, rng.choice(raws))
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

    async def go(target: Target, rng: random.Random) -> str | None:
        answer = await leave(target.port, ask("/v1/completions", body), rng.uniform(*after_s), wait_for)
        return answer.error or (f"status {answer.status}" if answer.status not in (0, 200) else None)

    return go


def served(body: Json, read_after_s: float = 0.0) -> Bad:
    """An odd client that must be served all the same."""
    job = Job("odd", "/v1/completions", body)

    async def go(target: Target, rng: random.Random) -> str | None:
        try:
            job.tokens(await exchange(target.port, ask(job.path, body), read_after_s=read_after_s))
        except (ValueError, KeyError, IndexError) as error:
            return str(error)
        return None

    return go


async def half_a_body(target: Target, rng: random.Random) -> str | None:
    raw = json.dumps(LONG).encode()
    return (await leave(target.port, post("/v1/completions", raw[:20], len(raw)), rng.uniform(0, 0.3))).error or None


async def half_a_body_and_waits(target: Target, rng: random.Random) -> str | None:
    raw = json.dumps(LONG).encode()
    answer = await exchange(target.port, post("/v1/completions", raw[:20], len(raw)), target.body_timeout_s + 30)
    return None if answer.status == 408 else f"{answer.error or answer.status} instead of 408"


async def no_http(target: Target, rng: random.Random) -> str | None:
    answer = await exchange(target.port, rng.randbytes(200) + b"\r\n\r\n")
    return None if answer.status in (0, 400) and answer.error != "TimeoutError" else f"status {answer.status}"


def _with(**fields: Any) -> bytes:
    return ask("/v1/completions", {**LONG, **fields})


TEN_MEGABYTES = "x" * (10 << 20)
REFUSED: dict[str, Bad] = {
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
ADMITTED: dict[str, Bad] = {
    "leaves mid-stream": leaves((0.0, 0.5), {**LONG, "stream": True}, wait_for=100),
    "leaves at once": leaves((0.0, 0.0), {**LONG, "stream": True}),
    "leaves a whole answer": leaves((0.0, 0.5), LONG),
    "leaves three answers": leaves((0.0, 0.3), {**LONG, "n": 3, "stream": True}),
    "reads late": served(SHORT, read_after_s=1.0),
    "unknown fields": served({**SHORT, "colour": "blue", "user": "someone", "x": {"y": [1]}}),
}
BAD = {**REFUSED, **ADMITTED}
# one client each, at a slower pace: they cost a bad client as much as they cost the server
RARE = ("ten megabytes", "half a body, waits")

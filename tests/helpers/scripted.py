"""An OpenAI-compatible server whose times, tokens and faults are scripted; also a command, for arms that start one."""

import argparse
import asyncio
import json
import socket
import threading
import time
from dataclasses import dataclass, field

import uvicorn


@dataclass
class Script:
    """What the server does. Seconds; `group` tokens come in one chunk; request numbers count from 0."""

    ttft: float = 0.03
    tpot: float = 0.01
    group: int = 1
    token_ids: bool = True
    running_usage: bool = True
    strict: bool = False  # refuses keys beyond OpenAI's
    eos_after: int | None = None
    cached: int = 0
    wrong_token_at: int | None = None
    random_tokens: bool = False
    answer: str | None = None
    fail: set[int] = field(default_factory=set)
    busy: set[int] = field(default_factory=set)
    cut: set[int] = field(default_factory=set)


class Scripted:
    """The ASGI application; `bodies` are the requests it got, `open` how many it answers at the moment."""

    def __init__(self, script: Script | None = None):
        self.script, self.bodies, self.open, self.most_open = script or Script(), [], 0, 0

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": f"{message['type']}.complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        raw, more = b"", True
        while more:
            message = await receive()
            raw, more = raw + message.get("body", b""), message.get("more_body", False)
        path = scope["path"]
        if path == "/health":
            return await reply(send, 200, b"")
        if path == "/v1/models":
            return await reply(send, 200, json.dumps({"data": [{"id": "scripted"}]}).encode())
        if path == "/model_info":
            return await reply(send, 200, json.dumps({"vocab_size": 1000}).encode())
        if path == "/metrics":
            return await reply(send, 200, self.metrics().encode())
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return await reply(send, 404, b"{}")
        return await self.complete(json.loads(raw), path.endswith("chat/completions"), send)

    def metrics(self) -> str:
        count = len(self.bodies)
        return (
            f'# TYPE scripted:requests_total counter\nscripted:requests_total{{model_name="s"}} {count}\n'
            f"# TYPE scripted:num_preemptions_total counter\nscripted:num_preemptions_total 0\n"
            f"# TYPE scripted:num_requests_running gauge\nscripted:num_requests_running {self.open}\n"
        )

    async def complete(self, body, chat, send):
        s, number = self.script, len(self.bodies)
        self.bodies.append(body)
        if s.strict and body.keys() - {"model", "prompt", "messages", "max_tokens", "stream", "temperature", "stop"}:
            return await reply(send, 422, b'{"detail": "Unexpected fields"}')
        if number in s.fail:
            return await reply(send, 500, b'{"error": {"message": "planted"}}')
        if number in s.busy:
            return await reply(send, 503, b'{"error": {"message": "full"}}')
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            return await self.stream(body, chat, number, send)
        finally:
            self.open -= 1

    def tokens(self, body) -> list[int]:
        """A function of the prompt alone, but for planted faults."""
        s, prompt = self.script, body.get("prompt") or body["messages"][0]["content"]
        seed = sum((i + 1) * (v if isinstance(v, int) else ord(v)) for i, v in enumerate(prompt))
        if s.random_tokens:
            seed += time.perf_counter_ns() % 997
        count = body["max_tokens"]
        if s.eos_after is not None and not body.get("ignore_eos"):
            count = min(count, s.eos_after)
        ids = [(seed * 31 + i * 17) % 997 for i in range(count)]
        if s.wrong_token_at is not None and len(ids) > s.wrong_token_at and seed % 5 == 0:
            ids[s.wrong_token_at] += 1
        return ids

    async def stream(self, body, chat, number, send):
        s, ids = self.script, self.tokens(body)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        zero, sent = time.perf_counter(), 0
        options = body.get("stream_options") or {}
        while sent < len(ids):
            part = ids[sent : sent + s.group]
            due = zero + s.ttft + s.tpot * (sent + len(part) - 1)
            await asyncio.sleep(due - time.perf_counter())
            sent += len(part)
            last = sent == len(ids)
            text = s.answer if s.answer is not None and last else " ".join(map(str, part)) + " "
            text = "" if s.answer is not None and not last else text
            chunk = {"choices": [self.choice(body, chat, text, part, last)]}
            if s.running_usage and options.get("continuous_usage_stats"):
                chunk["usage"] = usage(body, sent, s.cached)
            await push(send, chunk)
            if number in s.cut and sent >= len(ids) // 2:
                return await send({"type": "http.response.body", "body": b"", "more_body": False})
        if options.get("include_usage") or s.strict:
            await push(send, {"choices": [], "usage": usage(body, sent, s.cached)})
        return await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    def choice(self, body, chat, text, part, last):
        choice = {"index": 0, "finish_reason": "length" if last else None}
        choice |= {"delta": {"content": text}} if chat else {"text": text}
        if self.script.token_ids and body.get("return_token_ids"):
            choice["token_ids"] = part
        if body.get("logprobs") and not chat:
            choice["logprobs"] = {"token_logprobs": [-1.0 - id_ / 1000 for id_ in part]}
        return choice


def usage(body, sent, cached):
    prompt = body.get("prompt") or body["messages"][0]["content"]
    count = len(prompt) if isinstance(prompt, list) else len(prompt.split())
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"prompt_tokens": count, "completion_tokens": sent, "total_tokens": count + sent, **details}


async def push(send, document):
    await send(
        {"type": "http.response.body", "body": b"data: " + json.dumps(document).encode() + b"\n\n", "more_body": True}
    )


async def reply(send, status, body):
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})


class Running:
    """A scripted server in a thread, on a free loopback port."""

    def __init__(self, script: Script | None = None, **changes):
        self.app = Scripted(script or Script(**changes))
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._sock.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(self.app, log_level="error"))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve([self._sock])), daemon=True)

    def __enter__(self) -> "Running":
        self._thread.start()
        end = time.monotonic() + 20
        while not self._server.started:
            assert time.monotonic() < end, "the scripted server did not start"
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(10)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    for name, kind in (("ttft", float), ("tpot", float), ("wrong-token-at", int), ("group", int)):
        parser.add_argument(f"--{name}", type=kind)
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    port = given.pop("port")
    print(f"scripted server on {port}", flush=True)
    uvicorn.run(Scripted(Script(**given)), host="127.0.0.1", port=port, log_level="error")


if __name__ == "__main__":
    main()

"""Requests as bytes over plain connections: also what no HTTP library would send."""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
PATIENCE_S = 120.0
# the status and a first event come before there is a token
_TOKENS = b'"token_ids":['


@dataclass(frozen=True)
class Target:
    """A server at a loopback port, and the seconds that it gives a body to arrive."""

    port: int
    body_timeout_s: float = 30.0


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


async def get(port: int, path: str, method: str = "GET") -> bytes:
    """Body of an answer that must be 200; ValueError otherwise."""
    head = f"{method} {path} HTTP/1.1\r\nHost: soak\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    answer = await exchange(port, head.encode())
    if answer.status != 200:
        raise ValueError(f"{path}: {answer.error or answer.status}")
    return answer.body


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

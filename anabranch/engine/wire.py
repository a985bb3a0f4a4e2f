"""Messages over a stream socket between two processes of one user: eight bytes of length, then a pickle."""

import asyncio
import pickle
import select
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!Q")


def pack(message: Any) -> bytes:
    """A message as bytes."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


def send(sock: socket.socket, message: Any) -> None:
    """Send from a thread that may wait; OSError when the other side has gone."""
    sock.sendall(pack(message))


def receive(sock: socket.socket) -> Any:
    """Wait for one message, and read not a byte more; EOFError when the other side has gone."""
    return pickle.loads(exactly(sock, _LENGTH.unpack(exactly(sock, _LENGTH.size))[0]))


async def receive_async(reader: asyncio.StreamReader) -> Any:
    """The same in an event loop."""
    [length] = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def has_more(sock: socket.socket) -> bool:
    """Whether a message, or the end, can be read without waiting for its beginning."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def exactly(sock: socket.socket, count: int) -> bytes:
    """So many bytes; EOFError when the other side has gone."""
    data = bytearray()
    while len(data) < count:
        try:
            piece = sock.recv(min(count - len(data), 1 << 20))
        except ConnectionResetError:
            piece = b""
        if not piece:
            raise EOFError("the other side has gone")
        data += piece
    return bytes(data)

"""Sockets between the head (global rank 0) and every other rank, and the watch that ends a job which has lost a rank.

Each rank has two: `orders` carries what to compute and what came of it, `pulse` heartbeats and last words. Only who
knows the job's token, which the store of the rendezvous hands out, is listened to: what follows it is a pickle.
"""

import os
import secrets
import select
import socket
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torch._C._distributed_c10d import Store

from anabranch.engine import wire
from anabranch.engine.messages import RankFailed
from anabranch.parallel.rendezvous import MEETING_S, Rendezvous

BEAT_S = 0.5
SILENCE_S = 15.0  # without a heartbeat a rank is taken for dead
_SETTLE_S = 0.5  # what else is heard in this time belongs to the same failure
_GRACE_S = 5.0  # what the head's main thread gets to end in order
_TOKEN_BYTES = 32


class Post:
    """A rank's side: its orders, and a thread that beats, and that ends the process when the head has gone."""

    def __init__(self, where: Rendezvous, store: Store) -> None:
        address, port, token = store.get("head").decode().split()
        self.rank, self._done, self._began, self._over = where.rank, 0, 0.0, False
        self._lock = threading.Lock()
        self.orders, self._pulse = (_connect(address, int(port), token, where.rank, kind) for kind in "op")
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def receive(self) -> Any:
        """The next order; the rank counts as idle until it comes."""
        self._began = 0.0
        order = wire.receive(self.orders)
        self._done, self._began = self._done + 1, time.monotonic()
        return order

    def unhurried(self) -> None:
        """This order may take as long as it likes."""
        self._began = 0.0

    def send(self, message: Any) -> None:
        """What came of an order."""
        wire.send(self.orders, message)

    def last_words(self, kind: str, reason: str) -> None:
        """Say why this rank ends: "refused" is the user's fault, "failed" ours."""
        self._over = True
        with suppress(OSError), self._lock:
            wire.send(self._pulse, (kind, reason))

    def _beat(self) -> None:
        while not self._over:
            since = time.monotonic() - self._began if self._began else 0.0
            try:
                with self._lock:
                    wire.send(self._pulse, ("beat", self._done, since))
                readable, _, _ = select.select([self._pulse], [], [], BEAT_S)
                gone = bool(readable) and not self._pulse.recv(1)
            except OSError:
                gone = True
            if gone and not self._over:
                sys.stderr.flush()
                os._exit(1)

    def close(self) -> None:
        """Told to stop: nobody need end us."""
        self._over = True
        for sock in (self.orders, self._pulse):
            with suppress(OSError):
                sock.close()


class Hub:
    """The head's side.

    Args:
        fate: how a rank's process ended, as far as this machine knows: a phrase, or nothing.
        patience_s: seconds that a rank may spend on one order.

    Attributes:
        give_up: called when the main thread cannot be told of a failure; it must end the process.
        kill: ends the ranks that this process has started, whatever they do.
    """

    def __init__(self, where: Rendezvous, store: Store, fate: Callable[[int], str | None], patience_s: float) -> None:
        self.world, self._fate, self._patience = where.world, fate, patience_s
        self.give_up: Callable[[str], None] = _tell
        self.kill: Callable[[], None] = lambda: None
        self.failure: tuple[str, str] | None = None
        self._failed, self._over, self._began, self._idle = threading.Event(), False, 0.0, False
        self._told = threading.Event()
        self._orders: dict[int, socket.socket] = {}
        self._pulses: dict[int, socket.socket] = {}
        self._early: dict[int, deque[Any]] = defaultdict(deque)
        self._meet(where.own_address(), store)
        self._watch = threading.Thread(target=self._listen, name="watch", daemon=True)
        self._watch.start()

    def send(self, rank: int, packed: bytes) -> None:
        """An order, already packed: most go to several ranks."""
        self._orders[rank].sendall(packed)

    def receive(self, rank: int, kind: str) -> Any:
        """The next message (kind, value) of this kind from a rank; what comes before it is kept for later."""
        early = self._early[rank]
        for message in list(early):
            if message[0] == kind:
                early.remove(message)
                return message[1]
        while (message := wire.receive(self._orders[rank]))[0] != kind:
            early.append(message)
        return message[1]

    def busy(self, on: bool) -> None:
        """Whether the head itself computes: its own steps may hang, too."""
        self._idle, self._began = not on, time.monotonic() if on else 0.0

    def explain(self, error: BaseException) -> BaseException:
        """The failure behind an error that the main thread met, once the watch knows it; else the error itself."""
        if not self._failed.wait(_SETTLE_S + 2.0):
            return error
        self._told.set()
        assert self.failure is not None
        kind, reason = self.failure
        return ValueError(reason) if kind == "refused" else RankFailed(reason)

    def close(self) -> None:
        """Tell every rank to stop."""
        if not self._over:
            self._over = True
            for sock in self._orders.values():
                with suppress(OSError):
                    wire.send(sock, ("stop",))

    def _meet(self, address: str, store: Store) -> None:
        """Wait for both connections of every rank; one that ends before it comes is a failure.

        Raises:
            RankFailed: it ended, or did not come in time.
        """
        token, end = secrets.token_hex(_TOKEN_BYTES // 2), time.monotonic() + MEETING_S
        with socket.create_server((address, 0), backlog=2 * self.world) as server:
            store.set("head", f"{address} {server.getsockname()[1]} {token}")
            server.settimeout(0.2)
            while len(self._orders) + len(self._pulses) < 2 * (self.world - 1):
                with suppress(TimeoutError, OSError, EOFError):
                    self._admit(server.accept()[0], token)
                missing = [rank for rank in range(1, self.world) if rank not in self._pulses]
                for rank in missing:
                    if (how := self._fate(rank)) is not None:
                        raise RankFailed(f"rank {rank} {how} before it joined")
                if missing and time.monotonic() > end:
                    raise RankFailed(f"ranks {missing} did not join within {MEETING_S:g} s")

    def _admit(self, sock: socket.socket, token: str) -> None:
        sock.settimeout(5.0)
        words = wire.exactly(sock, _TOKEN_BYTES).decode(errors="replace")
        if not secrets.compare_digest(words.encode(), token.encode()):
            sock.close()
            return
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        rank, kind = wire.receive(sock)
        (self._orders if kind == "o" else self._pulses)[rank] = sock

    def _listen(self) -> None:
        """The watch: until there is a failure, or the job is over."""
        heard = dict.fromkeys(self._pulses, time.monotonic())
        state = dict.fromkeys(self._pulses, (0, 0.0))
        ranks = {sock: rank for rank, sock in self._pulses.items()}
        bad: dict[int, tuple[str, str]] = {}
        first = None
        while not self._over and (first is None or time.monotonic() < first + _SETTLE_S):
            readable, _, _ = select.select([s for s in ranks if ranks[s] not in bad], [], [], BEAT_S / 2)
            for sock in readable:
                rank = ranks[sock]
                match _hear(sock):
                    case ("beat", done, since):
                        heard[rank], state[rank] = time.monotonic(), (done, since)
                    case None:
                        bad[rank] = ("ended", f"rank {rank} {self._fate(rank) or 'has gone'}")
                    case (kind, reason):
                        bad[rank] = (kind, reason)
            if not bad and (late := self._late(heard, state)):
                bad[late[0]] = ("hangs", late[1])
            if bad and first is None:
                first = time.monotonic()
        if bad and not self._over:
            self._fail(bad)

    def _late(self, heard: Mapping[int, float], state: Mapping[int, tuple[int, float]]) -> tuple[int, str] | None:
        now = time.monotonic()
        for rank, when in heard.items():
            if now - when > SILENCE_S:
                return rank, f"rank {rank} has been silent for {SILENCE_S:g} s"
        waits = {rank: since for rank, (_, since) in state.items()} | {0: now - self._began if self._began else 0.0}
        slow = max(waits, key=lambda rank: waits[rank])
        if waits[slow] <= self._patience:
            return None
        # ranks wait for each other: the one that has begun least, or is not heard, is the one to look at
        each = (
            f"rank {rank} began order {done} and was heard {now - heard[rank]:.1f} s ago"
            for rank, (done, _) in sorted(state.items())
        )
        return slow, f"a step has taken {waits[slow]:.0f} s (rank_timeout={self._patience:g}): {', '.join(each)}"

    def _fail(self, bad: Mapping[int, tuple[str, str]]) -> None:
        # whoever lost its peer says so as well: the one that ended without a word, or was refused, comes first
        order = {"refused": 0, "ended": 1, "hangs": 2}
        rank = min(bad, key=lambda rank: order.get(bad[rank][0], 3))
        kind, reason = bad[rank]
        self.failure = kind, reason
        self._failed.set()
        for sock in self._orders.values():
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes a main thread that waits for a result
        if self._idle or not self._told.wait(_GRACE_S):
            self.kill()
            self.give_up(reason)


def _hear(sock: socket.socket) -> Any:
    try:
        return wire.receive(sock)
    except (EOFError, OSError):
        return None


def _connect(address: str, port: int, token: str, rank: int, kind: str) -> socket.socket:
    sock = socket.create_connection((address, port), timeout=MEETING_S)
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(token.encode())
    wire.send(sock, (rank, kind))
    return sock


def _tell(reason: str) -> None:
    print(f"error: {reason}", file=sys.stderr, flush=True)
    os._exit(1)

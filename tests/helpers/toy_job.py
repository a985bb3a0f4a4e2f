"""A job of several ranks in one process: the real head, orders and followers, the toy model, and queues for sockets.

A rank does what it is told as late as it can: when the head wants to hear from it, or begins to work again.
"""

import pickle
from collections import deque

import torch
from helpers.toy import VOCAB, toy_runner

from anabranch.config.model import ModelConfig
from anabranch.engine.fleet import Fleet
from anabranch.engine.follower import Follower
from anabranch.engine.joint import JointEngine
from anabranch.engine.wire import pack
from anabranch.parallel.layout import Layout

_LENGTH = len(pack(None)) - len(pickle.dumps(None, protocol=pickle.HIGHEST_PROTOCOL))


class _Post:
    def __init__(self) -> None:
        self.said: deque = deque()

    def send(self, message) -> None:
        self.said.append(pickle.loads(pickle.dumps(message)))

    def unhurried(self) -> None: ...


class _Hub:
    """What `Fleet` and `JointEngine` ask of `engine.links.Hub`."""

    failure = None

    def __init__(self, followers: dict[int, tuple[_Post, Follower]]) -> None:
        self._followers = followers
        self._orders: dict[int, deque] = {rank: deque() for rank in followers}
        self.most_unread = 0

    def send(self, rank: int, packed: bytes) -> None:
        self._orders[rank].append(pickle.loads(packed[_LENGTH:]))

    def receive(self, rank: int, kind: str):
        post, follower = self._followers[rank]
        while not any(message[0] == kind for message in post.said):
            self._obey(rank, follower)
        found = next(message for message in post.said if message[0] == kind)
        post.said.remove(found)
        return found[1]

    def busy(self, on: bool) -> None:
        if on:
            self.settle()

    def settle(self) -> None:
        """Every rank has done what it was told."""
        for rank, (_, follower) in self._followers.items():
            while self._orders[rank]:
                self._obey(rank, follower)

    def _obey(self, rank: int, follower: Follower) -> None:
        follower.obey(self._orders[rank].popleft())
        self.most_unread = max(self.most_unread, len(follower._flights))

    def close(self) -> None: ...

    def explain(self, error: BaseException) -> BaseException:
        return error


def toy_job(
    config: ModelConfig,
    layout: Layout,
    *,
    slots: int,
    pages: int,
    snapshots: int,
    chunk: int = 100,
    ahead: bool = False,
    saves: bool = False,
) -> JointEngine:
    """The head of a job in which every rank computes the whole toy model; its replicas share nothing."""
    size = {"slots": slots, "pages": pages, "snapshots": snapshots, "saves": saves}
    runners = [toy_runner(config, **size, samples=layout.rank(rank).samples) for rank in range(layout.world)]
    followers = {}
    for rank in range(1, layout.world):
        post = _Post()
        followers[rank] = post, Follower(post, runners[rank])
    hub = _Hub(followers)
    fleet = Fleet(layout, hub, None, torch.device("cpu"), {})  # type: ignore[arg-type]
    assert runners[0].vocab == VOCAB
    return JointEngine(runners[0], fleet, (), 4096, chunk, snapshots > 0, ahead)


def check_ranks(engine: JointEngine) -> None:
    """The ranks of a replica hold the same states and rows, once no change is on its way to them."""
    hub = engine.fleet.hub
    assert isinstance(hub, _Hub)
    hub.settle()
    for dp_rank, scribe in enumerate(engine._scribes):
        runners = [hub._followers[rank][1].runner for rank in engine.fleet.members(dp_rank)]
        if not dp_rank and not scribe.changes:
            runners.append(engine.runner)
        states, rows = ([r.cache.layers[i] for r in runners] for i in (0, 1))
        for runner_state, runner_rows in zip(states, rows, strict=True):
            assert torch.equal(runner_state.state, states[0].state)
            assert torch.equal(runner_state.conv, states[0].conv)
            # the last page takes the rows of nobody
            assert torch.equal(runner_rows.pages[:-1], rows[0].pages[:-1])

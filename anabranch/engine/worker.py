"""The engine's side of a service: obeys messages, steps while there is work, and tells what became of it."""

import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from anabranch.engine import wire
from anabranch.engine.facts import load_document, stats_of
from anabranch.engine.llm import LLM
from anabranch.engine.messages import EngineFailed, Update
from anabranch.engine.request import Request
from anabranch.engine.sampling import SamplingParams


class Worker:
    """Runs one engine, in one thread, for whoever holds the other end of a socket.

    Args:
        llm: the loaded model.
        sock: where messages come from and go to; see `engine.messages`.
    """

    def __init__(self, llm: LLM, sock: socket.socket) -> None:
        self._llm, self._sock = llm, sock
        self._requests: dict[int, Request] = {}
        self._reported: dict[int, int] = {}
        self._news: list[tuple[int, tuple[Any, ...]]] = []
        self._stopping = False
        self._profiler: torch.profiler.profile | None = None
        self._sending = threading.Lock()
        if llm.fleet is not None:
            llm.fleet.hub.give_up = self._give_up
        self._calls: dict[str, Callable[..., Any]] = {
            "flush_cache": self._flush_cache,
            "expert_load": self._expert_load,
            "update_weights": self._update_weights,
            "start_profile": self._start_profile,
            "stop_profile": self._stop_profile,
        }

    def run(self) -> None:
        """Until it is told to stop or nobody listens any more; any other end is told, and raised."""
        try:
            while not self._stopping:
                self._listen()
                if self._llm.engine.busy:
                    for request in self._llm.engine.step():
                        self._tell(request)
                # one message a step, however many answers grew
                self._send(("news", self._news, stats_of(self._llm.engine)))
                self._news = []
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return
        except BaseException as error:
            kind = "" if isinstance(error, EngineFailed) else f"{type(error).__name__}: "
            self._send(("failed", f"{kind}{error}"))
            raise

    def _listen(self) -> None:
        """Obey all that was said since the last step; with nothing to compute, wait for more."""
        if not self._llm.engine.busy:
            self._obey(wire.receive(self._sock))
        while wire.has_more(self._sock):
            self._obey(wire.receive(self._sock))

    def _obey(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("submit", int(number), prompt, params, skip_special, arrived):
                self._submit(number, prompt, params, skip_special, arrived)
            case ("abort", int(number)):
                self._abort(number)
            case ("call", number, name, args):
                self._call(number, name, args)
            case ("stop",):
                self._stopping = True
                for number in list(self._requests):
                    self._abort(number)

    def _submit(
        self, number: int, prompt: Sequence[int], params: SamplingParams, skip_special: bool, arrived: float
    ) -> None:
        try:
            request = self._llm.request(prompt, params, skip_special=skip_special)
            # the asker's number and clock: time on the way is time in the queue
            request.id, request.arrived = number, arrived
            self._llm.engine.add(request)
        except ValueError as error:
            self._note(number, Update(finish_reason="error", error=str(error)))
            return
        self._requests[number], self._reported[number] = request, 0

    def _abort(self, number: int) -> None:
        if (request := self._requests.get(number)) is not None:
            self._llm.engine.abort(request)
            self._tell(request)

    def _call(self, number: int, name: str, args: Sequence[Any]) -> None:
        try:
            value, error = self._calls[name](*args), None
        except Exception as caught:  # an operator's wish must not end everyone's answers
            value, error = None, str(caught) or type(caught).__name__
        self._send(("result", number, value, error))

    def _tell(self, r: Request) -> None:
        """Note what is new about a request since the last time."""
        seen = self._reported.get(r.id)
        if seen is None:
            return
        new, text = r.sampled[seen:], r.text.take()
        if not new and not text and r.finish_reason is None:
            return
        update = Update(
            text=text,
            token_ids=[s.token for s in new],
            logprobs=[s.logprob for s in new],
            top_logprobs=[s.top for s in new],
            finish_reason=r.finish_reason,
            error=r.error,
            prompt_tokens=len(r.prompt),
            cached_tokens=r.cached_tokens,
            prompt_logprobs=r.prompt_logprobs if not seen and r.prompt_logprobs else None,
            queue_s=None if seen or r.admitted is None else r.admitted - r.arrived,
        )
        self._note(r.id, update)
        self._reported[r.id] = seen + len(new)
        if r.finish_reason is not None:
            del self._requests[r.id], self._reported[r.id]

    def _note(self, number: int, update: Update) -> None:
        # plain tuples take a quarter of the time to write
        self._news.append((number, tuple(update)))

    def _send(self, message: tuple[Any, ...]) -> None:
        with self._sending:
            wire.send(self._sock, message)

    def _give_up(self, reason: str) -> None:
        """From another thread: a rank has gone, and this one cannot be waited for."""
        if self._sending.acquire(timeout=1.0):
            with suppress(OSError):
                wire.send(self._sock, ("failed", reason))
        os._exit(1)

    def _flush_cache(self) -> bool:
        """Forget cached prefixes; False if there is no prefix cache."""
        return self._llm.engine.flush()

    def _expert_load(self) -> dict[str, Any]:
        return load_document(self._llm)

    def _update_weights(self, directory: Path) -> int:
        """Overwrite the weights with those of a checkpoint, behind the last step; how many were written."""
        while self._llm.engine.busy:
            for request in self._llm.engine.step():
                self._tell(request)
        return self._llm.update_weights(directory)

    def _start_profile(self, directory: Path) -> None:
        if self._profiler is not None:
            raise ValueError("a profile is being recorded already")
        directory.mkdir(parents=True, exist_ok=True)
        self._profiler = torch.profiler.profile()
        self._profiler.start()

    def _stop_profile(self, directory: Path) -> Path:
        if self._profiler is None:
            raise ValueError("no profile is being recorded")
        profiler, self._profiler = self._profiler, None
        path = directory / f"trace-{len(list(directory.glob('trace-*.json')))}.json"
        profiler.stop()
        profiler.export_chrome_trace(str(path))
        return path

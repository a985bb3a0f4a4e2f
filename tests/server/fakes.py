"""A scripted engine behind the service's interface, and requests to an app without a socket."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import httpx

from anabranch.config.fusion import FusionConfig
from anabranch.config.hf import parse_model_config
from anabranch.engine.limits import Limits
from anabranch.engine.messages import Facts, QueueFull, Update
from anabranch.fusion.plan import make_plan
from anabranch.models.tiny import SPECIALS, tiny_config
from anabranch.models.tokenizer import Tokenizer, byte_level_tokenizer
from anabranch.server.app import create_app
from anabranch.server.settings import ServerSettings

HANG = object()
STATS = {
    **dict.fromkeys(("running", "waiting", "slots_used", "pages_used", "prompt_tokens", "generation_tokens"), 0),
    **dict.fromkeys(("prefix_queries", "prefix_hits", "preemptions", "nonfinite"), 0),
    "slots_total": 4,
    "pages_total": 8,
    "finished": {"stop": 3},
    "eager_steps": {"no graphs": 2},
    "graph_replays": {8: 5},
    "counters": {"kda.whole": 2},
}
STATS["replicas"] = [{name: STATS[name] for name in STATS if isinstance(STATS[name], int)}]


def spell(*pieces: str, reason: str | None = "stop", **more) -> list[Update]:
    """One update a piece, a token a byte; the last one has the reason."""
    updates = []
    for i, piece in enumerate(pieces):
        ids = list(piece.encode())
        last = i == len(pieces) - 1
        updates.append(
            Update(
                text=piece,
                token_ids=ids,
                logprobs=[-0.5] * len(ids),
                top_logprobs=[{token: -0.5, 0: -float("inf")} for token in ids],
                finish_reason=reason if last else None,
                prompt_tokens=7,
                cached_tokens=3,
                **more,
            )
        )
    return updates


class FakeTicket:
    def __init__(self, service, script: Iterable):
        self.service, self.script, self.gone, self.done = service, iter(script), asyncio.Event(), False

    def __aiter__(self):
        return self

    async def __anext__(self) -> Update:
        if self.done:
            raise StopAsyncIteration
        step = next(self.script)
        if step is HANG:
            await self.gone.wait()
            step = Update(finish_reason="abort")
        if isinstance(step, Exception):
            raise step
        self.done = step.finish_reason is not None
        return step

    def abort(self):
        if not self.done:
            self.service.aborted += 1
        self.gone.set()


class FakeService:
    """Answers every request with `script`; remembers what it was asked."""

    def __init__(self, architecture: str = "k3", script: Iterable | None = None, tokenizer: bool = True):
        config = parse_model_config(tiny_config(architecture))
        plan = make_plan(config, FusionConfig(), "float32")
        self.tokenizer = Tokenizer(byte_level_tokenizer(SPECIALS[architecture])) if tokenizer else None
        self.facts = Facts(
            path=Path(f"tiny-{architecture}"),
            architecture=config.architecture,
            limits=Limits(vocab=config.vocab_size, context=2000, cache=2048),
            vocab_size=config.vocab_size,
            fusions={choice.kind: (choice.path, choice.reason) for choice in (plan.kda, plan.mla)},
            memory="memory: none",
            document={"layout": {"tp": 1}},
            stats=STATS,
        )
        self.script = list(spell("ok") if script is None else script)
        self.prompts, self.params, self.skip_special, self.aborted = [], [], [], 0
        self.accepting, self.failure, self.full, self.drained = True, None, False, False
        self.flushes, self.profiles = 0, []
        self.updating, self.updates = False, []

    async def start(self):
        self.started = True

    async def drain(self, seconds):
        self.drained = True

    def submit(self, prompt, params, *, skip_special=True):
        if self.full:
            raise QueueFull("2 requests are waiting already")
        if not prompt:
            raise ValueError("the prompt has no tokens; need at least 1")
        if len(prompt) + params.max_tokens > self.facts.limits.context:
            raise ValueError(f"max_tokens={params.max_tokens} exceeds the context")
        self.prompts.append(prompt)
        self.params.append(params)
        self.skip_special.append(skip_special)
        return FakeTicket(self, self.script)

    def stats(self):
        return STATS

    async def flush_cache(self):
        self.flushes += 1
        return True

    async def update_weights(self, directory, *, abort=False):
        if not directory.is_dir():
            raise ValueError(f"{directory}: no such directory; need a local checkpoint directory")
        self.updates.append((directory, abort))
        return 17, 2

    async def start_profile(self, directory):
        if self.profiles:
            raise ValueError("a profile is being recorded already")
        self.profiles.append(directory)

    async def stop_profile(self, directory):
        if not self.profiles:
            raise ValueError("no profile is being recorded")
        return self.profiles.pop() / "trace-0.json"


class Site:
    """An app over a scripted engine."""

    def __init__(self, service: FakeService | None = None, **settings):
        self.service = service or FakeService()
        self.app = create_app(self.service, self.service.tokenizer, ServerSettings(**settings))

    def ask(self, method: str, path: str, **options) -> httpx.Response:
        async def go():
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **options)

        return asyncio.run(go())

    def post(self, path: str, **body) -> httpx.Response:
        return self.ask("POST", path, json=body)

    def complete(self, **body) -> httpx.Response:
        return self.post("/v1/completions", **{"prompt": "hi", **body})

    def chat(self, **body) -> httpx.Response:
        return self.post("/v1/chat/completions", **{"messages": [{"role": "user", "content": "hi"}], **body})


def refused(response: httpx.Response, status: int, *words: str, param: str | None = None) -> dict:
    """Asserts an OpenAI error of this status whose one line holds `words`."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    for word in words:
        assert word in error["message"], error["message"]
    assert error["param"] == param
    return error

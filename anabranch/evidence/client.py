"""An HTTP client of any OpenAI-compatible server that streams one answer and keeps its times."""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from anabranch.evidence.answer import AnswerReader
from anabranch.evidence.record import RequestRow
from anabranch.evidence.workload import Prompt

if TYPE_CHECKING:
    import httpx

# worth another try before anything was computed
_BUSY = (429, 503)
BACKENDS = ("openai", "openai-chat")


@dataclass(frozen=True, kw_only=True)
class ClientSpec:
    """How to reach a server and what to say with every request.

    `retries` counts further attempts after a refused connection, 429 or 503; the clock of a request does not stop.
    `logprobs` asks for the log probability of every token. `extra_body` is merged into each request.
    """

    base_url: str
    model: str | None = None
    backend: str = "openai"
    api_key: str | None = None
    temperature: float = 0.0
    ignore_eos: bool = True
    logprobs: bool = False
    stop: tuple[str, ...] = ()
    seed: int | None = None
    timeout_s: float = 600.0
    retries: int = 0
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend={self.backend!r}: accepted are {', '.join(BACKENDS)}")
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url={self.base_url!r}: need http://HOST:PORT or https://HOST:PORT")

    @property
    def root(self) -> str:
        """The server's address without /v1."""
        return self.base_url.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True)
class Manners:
    """Which extras beyond OpenAI's schema the server takes; `basis` is how its tokens are counted."""

    token_ids: bool = True
    usage: bool = True
    ignore_eos: bool = True
    basis: str = "total"


_LADDER = (
    Manners(),
    Manners(token_ids=False),
    Manners(token_ids=False, usage=False),
    Manners(token_ids=False, usage=False, ignore_eos=False),
)


class Client:
    """Connections to one server; `async with` opens and closes them."""

    def __init__(self, spec: ClientSpec) -> None:
        self.spec, self.manners, self.model = spec, Manners(), spec.model
        self._http: httpx.AsyncClient | None = None

    async def __aenter__(self) -> "Client":
        try:
            import httpx
        except ImportError:
            raise ValueError("needs httpx: pip install 'anabranch[evidence]'") from None
        headers = {"accept-encoding": "identity"}  # a compressor holds bytes back
        if self.spec.api_key:
            headers["authorization"] = f"Bearer {self.spec.api_key}"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        # no proxy of the environment may stand between the clock and the server
        self._http = httpx.AsyncClient(
            base_url=self.spec.root, headers=headers, limits=limits, timeout=self.spec.timeout_s, trust_env=False
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.http.aclose()

    @property
    def http(self) -> "httpx.AsyncClient":
        """The open connections."""
        assert self._http is not None, "the client is not open"
        return self._http

    async def find_model(self) -> str:
        """The name that was given, or the first model of the server.

        Raises:
            ValueError: the server cannot be reached or names no model.
        """
        if self.model is None:
            self.model = await self._first_model()
        return self.model

    async def probe(self, prompt: Prompt) -> Manners:
        """Ask once or more, with fewer and fewer extras, until the server answers.

        Raises:
            ValueError: the server cannot be reached or takes no form of the request.
        """
        await self.find_model()
        row = RequestRow(index=-1, start_s=0.0)
        for manners in _LADDER:
            self.manners = manners
            row = await self.stream(replace(prompt, max_tokens=4), -1, time.perf_counter())
            if row.ok:
                basis = "ids" if row.token_ids is not None else "usage" if len(row.counts) > 1 else "total"
                self.manners = replace(manners, basis=basis)
                return self.manners
        raise ValueError(f"{self.spec.root}: the server does not answer a streamed completion: {row.error}")

    async def stream(self, prompt: Prompt, index: int, zero: float) -> RequestRow:
        """One answer; times count from `zero` of `time.perf_counter`. Failures are in the row, never raised."""
        import httpx

        row = RequestRow(index=index, start_s=time.perf_counter() - zero, input_sha256=prompt.sha256)
        row.input_tokens = len(prompt.ids or ())
        body = json.dumps(self._body(prompt)).encode()
        try:
            while await self._attempt(body, row, zero):
                row.retries += 1
                row.error = None
                await asyncio.sleep(min(2.0, 0.1 * 2**row.retries))
        except (httpx.HTTPError, OSError) as error:
            row.error = f"{type(error).__name__}: {error}".rstrip(": ")
        if row.end_s is None or row.error is not None:
            row.end_s = time.perf_counter() - zero
        return row

    async def get(self, path: str) -> "httpx.Response | None":
        """A document of the server, or None if it has none there or cannot be reached."""
        import httpx

        try:
            response = await self.http.get(path)
        except (httpx.HTTPError, OSError):
            return None
        return response if response.status_code == 200 else None

    async def flush_cache(self) -> bool:
        """Ask the server to forget cached prefixes; False where it has no such route."""
        import httpx

        try:
            return (await self.http.post("/flush_cache")).status_code == 200
        except (httpx.HTTPError, OSError):
            return False

    async def _attempt(self, body: bytes, row: RequestRow, zero: float) -> bool:
        """Whether to try again; the row holds the answer or the error."""
        import httpx

        path = "/v1/chat/completions" if self.spec.backend == "openai-chat" else "/v1/completions"
        left = row.retries < self.spec.retries
        try:
            headers = {"content-type": "application/json"}
            async with self.http.stream("POST", path, content=body, headers=headers) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode("utf-8", "replace")
                    row.error = f"status {response.status_code}: {' '.join(text.split())[:300]}"
                    return left and response.status_code in _BUSY
                reader = AnswerReader(row)
                async for piece in response.aiter_raw():
                    reader.feed(piece, time.perf_counter() - zero)
                    if row.error is not None:
                        break
                reader.finish()
        except httpx.ConnectError:
            if not left:
                raise
            return True
        return False

    def _body(self, prompt: Prompt) -> dict[str, Any]:
        spec, chat = self.spec, self.spec.backend == "openai-chat"
        if chat and prompt.text is None:
            raise ValueError("backend openai-chat takes text: random ids need a tokenizer to become text")
        body: dict[str, Any] = {"model": self.model, "max_tokens": prompt.max_tokens, "stream": True}
        body["temperature"] = spec.temperature
        if chat:
            body["messages"] = [{"role": "user", "content": prompt.text}]
        else:
            body["prompt"] = prompt.text if prompt.ids is None else list(prompt.ids)
        if self.manners.usage:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        if self.manners.token_ids:
            body["return_token_ids"] = True
        if spec.ignore_eos and self.manners.ignore_eos:
            body["ignore_eos"] = True
        if spec.logprobs:
            body["logprobs"] = True if chat else 1
        if spec.stop:
            body["stop"] = list(spec.stop)
        if spec.seed is not None:
            body["seed"] = spec.seed
        return body | dict(spec.extra_body)

    async def _first_model(self) -> str:
        response = await self.get("/v1/models")
        try:
            return response.json()["data"][0]["id"]  # type: ignore[union-attr]
        except (AttributeError, ValueError, KeyError, IndexError, TypeError):
            raise ValueError(f"{self.spec.root}: /v1/models names no model; is the server up? give its name") from None

    async def vocab_size(self) -> int | None:
        """Size of the vocabulary where the server tells it."""
        for path in ("/model_info", "/get_model_info", "/server_info", "/get_server_info"):
            response = await self.get(path)
            try:
                found = None if response is None else response.json().get("vocab_size")
            except (ValueError, AttributeError):
                continue
            if isinstance(found, int):
                return found
        return None

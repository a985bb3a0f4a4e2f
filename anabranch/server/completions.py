"""POST /v1/completions."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from anabranch.engine.messages import Update
from anabranch.models.tokenizer import Tokenizer
from anabranch.server.desk import Desk
from anabranch.server.logprobs import CompletionLogprobs
from anabranch.server.protocol import CompletionRequest
from anabranch.server.replies import Reply
from anabranch.server.requests import JsonRoute


def completion_routes(desk: Desk) -> APIRouter:
    """The route, over one engine."""
    routes = APIRouter(route_class=JsonRoute)

    @routes.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Complete prompts; `echo` puts them in front, with their log probabilities if asked for."""
        desk.check_model(body.model)
        prompts = [await desk.encode(prompt) for prompt in body.prompt]
        skip_special = body.skip_special_tokens is not False
        session = desk.submit(prompts, body.params(), skip_special=skip_special)
        choices = [
            CompletionChoice(desk.tokenizer, body, i * body.choices + n, prompt, skip_special)
            for i, prompt in enumerate(prompts)
            for n in range(body.choices)
        ]
        reply = Reply(body, desk.model_name, "cmpl", "text_completion", "text_completion")
        return await reply.send(request, session, choices)

    return routes


class CompletionChoice:
    """One answer of a completion."""

    def __init__(
        self, tokenizer: Tokenizer | None, body: CompletionRequest, index: int, prompt: Sequence[int], skip: bool
    ) -> None:
        self._tokenizer, self._body, self._index, self._prompt = tokenizer, body, index, prompt
        self._decoder = tokenizer.stream(skip_special=skip) if tokenizer else None
        self._logprobs = CompletionLogprobs(tokenizer)
        self._parts: list[dict[str, Any]] = []
        self._echo_due = bool(body.echo)

    def push(self, update: Update) -> list[dict[str, Any]]:
        """One entry for each update, also without text: clients that count chunks then count steps."""
        entry: dict[str, Any] = {"index": self._index, "text": update.text, "logprobs": self._part(update)}
        entry["finish_reason"] = update.finish_reason
        if self._echo_due:
            echoed = self._body.prompt[self._index // self._body.choices]
            entry["text"] = (echoed if isinstance(echoed, str) else self._prompt_text()) + update.text
            self._echo_due = False
        if self._body.return_token_ids:
            entry["token_ids"] = update.token_ids
            if not self._parts:
                entry["prompt_token_ids"] = list(self._prompt)
        self._parts.append(entry)
        return [entry]

    def whole(self) -> dict[str, Any]:
        """All entries joined."""
        parts = self._parts
        whole = {**parts[0], "text": "".join(part["text"] for part in parts)}
        whole["finish_reason"] = parts[-1]["finish_reason"]
        found = [part["logprobs"] for part in parts if part["logprobs"] is not None]
        whole["logprobs"] = {name: [v for part in found for v in part[name]] for name in found[0]} if found else None
        if self._body.return_token_ids:
            whole["token_ids"] = [token for part in parts for token in part["token_ids"]]
        return whole

    def _prompt_text(self) -> str:
        return self._tokenizer.decode(self._prompt, skip_special=False) if self._tokenizer else ""

    def _part(self, update: Update) -> dict[str, list[Any]] | None:
        if self._body.logprobs is None:
            return None
        part: dict[str, list[Any]] = {}
        if update.prompt_logprobs is not None:
            logprobs, tops = zip(*update.prompt_logprobs, strict=True)
            decoder = self._tokenizer.stream(skip_special=False) if self._tokenizer else None
            part = self._logprobs.part(self._prompt, logprobs, tops, decoder)
        answer = self._logprobs.part(update.token_ids, update.logprobs, update.top_logprobs, self._decoder)
        return {name: part.get(name, []) + values for name, values in answer.items()}

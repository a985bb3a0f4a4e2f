"""POST /v1/chat/completions."""

from typing import Any

from fastapi import APIRouter, Request, Response

from anabranch.engine.messages import Update
from anabranch.models.answer import (
    Answer,
    AnswerParser,
    ArgumentsDelta,
    CallDelta,
    ContentDelta,
    Delta,
    ReasoningDelta,
)
from anabranch.server.desk import Desk
from anabranch.server.errors import refusing
from anabranch.server.logprobs import chat_logprobs
from anabranch.server.protocol import ChatRequest
from anabranch.server.replies import Reply
from anabranch.server.requests import JsonRoute


def chat_routes(desk: Desk) -> APIRouter:
    """The route, over one engine."""
    routes = APIRouter(route_class=JsonRoute)

    @routes.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """The assistant's next turn, cut into reasoning, content and tool calls."""
        desk.check_model(body.model)
        with refusing():
            thinking, effort = body.thinking
        options = {"thinking": thinking, "thinking_effort": effort, "tool_choice": body.tool_choice}
        prompt = await desk.render(body.messages, tools=body.tools or None, **options)
        # Kimi-Linear writes its calls with special tokens; what is not skipped can be parsed
        reads_markers = body.may_call and desk.architecture == "kimi_linear"
        skip_special = body.skip_special_tokens is not False and not reads_markers
        params = body.params(desk.max_len - len(prompt))
        session = desk.submit([prompt], params, skip_special=skip_special)
        choices = [ChatChoice(desk, body, index, thinking is not False) for index in range(body.choices)]
        reply = Reply(body, desk.model_name, "chatcmpl", "chat.completion", "chat.completion.chunk")
        if body.return_token_ids:
            reply.extra = {"prompt_token_ids": prompt}
        return await reply.send(request, session, choices)

    return routes


class ChatChoice:
    """One answer of a chat."""

    def __init__(self, desk: Desk, body: ChatRequest, index: int, thinking: bool) -> None:
        self._tokenizer, self._body, self._index = desk.need_tokenizer(), body, index
        self._parser: AnswerParser | None = None
        if desk.settings.parser == "kimi":
            self._parser = AnswerParser(desk.architecture, thinking=thinking, tools=body.may_call)
        self._deltas: list[Delta] = []
        self._logprobs: list[dict[str, Any]] = []
        self._token_ids: list[int] = []
        self._finish_reason: str | None = None
        self._started = False

    def push(self, update: Update) -> list[dict[str, Any]]:
        """The role first; then an entry for each delta, or an empty one, so that every step can be counted."""
        deltas = self._parse(update)
        self._deltas += deltas
        self._token_ids += update.token_ids
        entries = [self._entry(_delta(delta)) for delta in deltas] or [self._entry({})]
        if self._body.logprobs:
            new = chat_logprobs(self._tokenizer, update.token_ids, update.logprobs, update.top_logprobs)
            self._logprobs += new
            entries[0]["logprobs"] = {"content": new}
        if self._body.return_token_ids:
            entries[0]["token_ids"] = update.token_ids
        if update.finish_reason is not None:
            self._finish_reason = entries[-1]["finish_reason"] = self._reason(update.finish_reason)
        if not self._started:
            self._started = True
            entries.insert(0, self._entry({"role": "assistant", "content": ""}))
        return entries

    def whole(self) -> dict[str, Any]:
        """The message with everything that belongs to it."""
        message = Answer.of(self._deltas).message()
        whole = {"index": self._index, "message": message, "finish_reason": self._finish_reason}
        whole["logprobs"] = {"content": self._logprobs} if self._body.logprobs else None
        return whole | ({"token_ids": self._token_ids} if self._body.return_token_ids else {})

    def _parse(self, update: Update) -> list[Delta]:
        if self._parser is None:
            return [ContentDelta(update.text)] if update.text else []
        deltas = self._parser.push(update.text)
        return deltas if update.finish_reason is None else [*deltas, *self._parser.finish()]

    def _reason(self, reason: str) -> str:
        called = any(isinstance(delta, CallDelta) for delta in self._deltas)
        return "tool_calls" if called and reason == "stop" else reason

    def _entry(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta(delta: Delta) -> dict[str, Any]:
    """A parser's delta as the `delta` object of a chunk."""
    match delta:
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case ContentDelta(text):
            return {"content": text}
        case CallDelta(index, call_id, name):
            call = {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
        case ArgumentsDelta(index, text):
            call = {"index": index, "function": {"arguments": text}}
    return {"tool_calls": [call]}

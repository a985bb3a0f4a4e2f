"""A model's answer, as text, to reasoning, content and tool calls: piece by piece (`AnswerParser`) or whole (`parse`).

The text is the decoded completion with the markers of its format in it: of Kimi-K3 with `skip_special=True`, which
keeps them, of Kimi-Linear with `skip_special=not tools`, whose markers of tool calls are special tokens.

Broken markup raises nothing and loses no text: what is no markup is text of the place it stands in. Left out are only
white space between elements and a tag that the end of the text cut off. However the text is cut into pieces, the deltas
join to the same. A tool call that was cut off keeps its name and the arguments that came: they are not closed into
valid JSON, which would let a client run half a call.

Text alone cannot tell a marker from its letters. A model that writes out a whole tag as plain text has used it.
"""

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

from anabranch.models.answer_k3 import K3Scanner
from anabranch.models.answer_kl import KLScanner
from anabranch.models.answer_scanner import (
    ArgumentsDelta,
    CallDelta,
    ContentDelta,
    Delta,
    ReasoningDelta,
    Scanner,
)

__all__ = [
    "Answer",
    "AnswerParser",
    "ArgumentsDelta",
    "CallDelta",
    "ContentDelta",
    "Delta",
    "ReasoningDelta",
    "ToolCall",
    "parse",
]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments`: the text of a JSON object, or what the model wrote in its place."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer; `reasoning` is None where there was none."""

    reasoning: str | None
    content: str
    tool_calls: list[ToolCall]

    @classmethod
    def of(cls, deltas: Iterable[Delta]) -> Self:
        """The answer that the deltas of one parser add up to."""
        reasoning, content, calls = "", "", []
        arguments: list[list[str]] = []
        for delta in deltas:
            match delta:
                case ReasoningDelta(text):
                    reasoning += text
                case ContentDelta(text, moved):
                    content += text
                    reasoning = reasoning.removesuffix(text) if moved else reasoning
                case CallDelta():
                    calls.append(delta)
                    arguments.append([])
                case ArgumentsDelta(index, text):
                    arguments[index].append(text)
        made = [ToolCall(call.id, call.name, "".join(parts)) for call, parts in zip(calls, arguments, strict=True)]
        return cls(reasoning or None, content, made)

    def message(self) -> dict[str, Any]:
        """The OpenAI assistant message, which `ChatRenderer.render` takes back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["content"] = self.content or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


class AnswerParser:
    """Parses one answer while it grows: `push` each piece of text, then `finish`."""

    def __init__(
        self, architecture: str, *, thinking: bool, tools: bool, new_id: Callable[[], str] | None = None
    ) -> None:
        """
        Args:
            architecture: "kimi_linear" or "kimi_k3".
            thinking: the prompt was rendered for thinking; without effect for Kimi-Linear, which has no reasoning.
            tools: the request declared tools; without any, the markup of tool calls is plain content.
            new_id: makes the ids of Kimi-K3's calls, whose format has none; by default they are random, because clients
                match results by them over a whole conversation. Kimi-Linear's calls bring their own.

        Raises:
            ValueError: unknown architecture.
        """
        self._scanner = _scanner(architecture, thinking, tools, new_id or _random_id)

    def push(self, text: str) -> list[Delta]:
        """What `text` makes certain; perhaps nothing."""
        return self._scanner.push(text)

    def finish(self) -> list[Delta]:
        """The rest, once the text has ended."""
        return self._scanner.finish()


def parse(text: str, architecture: str, *, thinking: bool, tools: bool) -> Answer:
    """A whole answer at once; arguments and errors as of `AnswerParser`."""
    parser = AnswerParser(architecture, thinking=thinking, tools=tools)
    return Answer.of([*parser.push(text), *parser.finish()])


def _scanner(architecture: str, thinking: bool, tools: bool, new_id: Callable[[], str]) -> Scanner:
    if architecture == "kimi_k3":
        return K3Scanner(thinking=thinking, tools=tools, new_id=new_id)
    if architecture == "kimi_linear":
        return KLScanner(tools=tools)
    raise ValueError(f"unknown architecture {architecture!r}; accepted: kimi_linear, kimi_k3")


def _random_id() -> str:
    return f"call_{secrets.token_hex(12)}"

"""Kimi-K3's answers: channels of reasoning, content and tool calls (format: `chat_k3`).

The prompt ends with the first channel already open. A tag of the format acts wherever it makes sense, and ends what is
open inside of what it opens or closes: models leave closing tags out, or only the `<|sep|>` of one. Anything else that
looks like a tag is text of the place it stands in.
Source: Kimi-K3 released tokenizer code; bug reports on public servers of the model.
"""

import json
import re
from collections.abc import Callable

from anabranch.models.answer_scanner import HEADER_LIMIT, ContentDelta, ReasoningDelta, Scanner
from anabranch.models.chat_k3 import MARKERS

OPEN, CLOSE, SEP, END = MARKERS

_ATTRIBUTE = r'\s++(\w++)="([^"]*+)"'
_TAG = re.compile(rf"\s*+(\w*+)((?:{_ATTRIBUTE})*+)\s*+")
_ATTRIBUTES = re.compile(_ATTRIBUTE)
# what may still become a _TAG
_TAG_START = re.compile(rf'\s*+(\w*+)(?:{_ATTRIBUTE})*+(?:\s++(?:\w++(?:=(?:"[^"]*+)?)?)?)?')

_CHANNELS = frozenset(("think", "response", "message"))
_IN_TOOLS = frozenset(("call", "argument", "json"))
_DEPTH = {"call": 1, "argument": 2, "json": 2}


class K3Scanner(Scanner):
    """The answer of Kimi-K3; without `tools` the tools channel is plain content."""

    def __init__(self, *, thinking: bool, tools: bool, new_id: Callable[[], str]) -> None:
        """`thinking`: the prompt ended inside the think channel, else inside the response. `new_id`: ids of calls."""
        super().__init__(MARKERS)
        self._channels = _CHANNELS | {"tools"} if tools else _CHANNELS
        self._new_id = new_id
        # the open elements: nothing, one channel, or down to tools / call / argument
        self._path = ["think" if thinking else "response"]
        self._thought: list[str] = []
        self._form = ""
        self._value: list[str] | None = None

    def _text(self, text: str) -> None:
        place = self._path[-1] if self._path else ""
        if place == "think":
            self._thought.append(text)
            self._emit(ReasoningDelta(text))
        elif place == "response":
            self._emit(ContentDelta(text))
        elif place == "json":
            self._arguments(text)
        elif place == "argument":
            self._argument(text)
        else:
            self._stray(text)

    def _marker(self, found: re.Match[str]) -> int | None:
        marker, start = found.group(), found.end()
        if marker == END:
            self._close("message")
            return start
        if marker != SEP:
            following = self._pattern.search(self._pending, start)
            body = self._pending[start : following.start() if following else None]
            if following is None and self._may_become_tag(marker, body):
                return None
            if following and self._apply(marker, body, following.group()):
                return following.end() if following.group() == SEP else following.start()
        self._text(marker)
        return start

    def _may_become_tag(self, marker: str, body: str) -> bool:
        body = body[: len(body) - self._uncertain(body)]
        start = _TAG_START.fullmatch(body) if len(body) <= HEADER_LIMIT else None
        if start is None:
            return False
        names, is_whole = self._names(marker), start.end(1) < len(body)
        return start[1] in names if is_whole else any(name.startswith(start[1]) for name in names)

    def _apply(self, marker: str, body: str, ending: str) -> bool:
        """Does what the tag asks for; False where it asks for nothing that is possible here."""
        tag = _TAG.fullmatch(body) if len(body) <= HEADER_LIMIT else None
        if tag is None or (marker == OPEN and ending != SEP):
            return False
        name = tag[1]
        if marker == CLOSE and not name and ending == SEP:
            self._close(self._path[-1] if self._path else "message")
        elif name not in self._names(marker):
            return False
        elif marker == CLOSE:
            self._close(name)
        else:
            return self._open(name, {key: _unescape(value) for key, value in _ATTRIBUTES.findall(tag[2])})
        return True

    def _names(self, marker: str) -> frozenset[str]:
        """Names of the tags that mean something here."""
        if self._path[:1] != ["tools"]:
            return self._channels
        if len(self._path) < 3:
            return self._channels | _IN_TOOLS
        # no channel opens inside a value; one that ends there was left open by mistake
        return _IN_TOOLS if marker == OPEN else _IN_TOOLS | {"tools", "message"}

    def _close(self, name: str) -> None:
        if name == "response" and self._path == ["think"]:
            # the model wrote its reply without leaving the think channel
            reply = "".join(self._thought)
            self._emit(ContentDelta(reply if reply.strip() else "", moved=True))
        self._leave(_DEPTH.get(name, 0))

    def _open(self, name: str, attributes: dict[str, str]) -> bool:
        if name in ("argument", "json"):
            return self._open_body(name, attributes)
        if name == "call":
            if not attributes.get("tool"):
                return False
            self._leave(1)
            self._start_call(self._new_id(), attributes["tool"])
            self._form = ""
        else:
            self._leave(0)
            self._thought.clear()
        self._path.append(name)
        return True

    def _open_body(self, name: str, attributes: dict[str, str]) -> bool:
        """A call has arguments one by one, or all of them as one JSON text."""
        taken = ("", "object") if name == "argument" else ("",)
        if len(self._path) < 2 or self._form not in taken or (name == "argument" and "key" not in attributes):
            return False
        self._leave(2)
        if name == "argument":
            is_string = attributes.get("type", "string") == "string"
            self._value = None if is_string else []
            key = json.dumps(attributes["key"], ensure_ascii=False)
            self._arguments((", " if self._form else "{") + f"{key}: " + ('"' if is_string else ""))
        self._form = "object" if name == "argument" else "json"
        self._path.append(name)
        return True

    def _argument(self, text: str) -> None:
        if self._value is None:
            self._arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value.append(text)

    def _leave(self, depth: int) -> None:
        """Ends open elements until `depth` of them remain."""
        self._blank = ""
        while len(self._path) > depth:
            name = self._path.pop()
            if name == "argument":
                self._arguments('"' if self._value is None else _json("".join(self._value)))
            elif name == "call" and self._form != "json":
                self._arguments("}" if self._form else "{}")

    def _end(self) -> None:
        if self._path[-1:] == ["argument"] and self._value is not None:
            self._arguments("".join(self._value))


def _unescape(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")


def _json(text: str) -> str:
    """`text` as a JSON value: itself if it is one, else a string."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")

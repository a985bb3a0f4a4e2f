"""Kimi-Linear's answers: content, then a section of tool calls whose arguments are JSON text; no reasoning.

    content <|tool_calls_section_begin|>
        (<|tool_call_begin|> functions.NAME:INDEX <|tool_call_argument_begin|> JSON <|tool_call_end|>)*
    <|tool_calls_section_end|>

Understood as well, because models of the family write it: calls without their section, `tool_call_section` for
`tool_calls_section`, other spellings of the id, an end that the next marker implies, a call without arguments.
Source: Kimi-Linear chat template; bug reports on public servers of the same format.
"""

import re
from typing import Literal

from anabranch.models.answer_scanner import HEADER_LIMIT, ContentDelta, Scanner

SECTION_BEGIN = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
SECTION_END = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
CALL_BEGIN, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS_BEGIN = "<|tool_call_argument_begin|>"
MESSAGE_END = "<|im_end|>"

# the second form is what clients make of an id that may only have letters, digits, "-" and "_"
_ID = re.compile(r"(?:functions\.)?(.+):\d+|functions_(.+)_\d+", re.DOTALL)


class KLScanner(Scanner):
    """The answer of Kimi-Linear; without `tools` every marker of a call is plain content."""

    def __init__(self, *, tools: bool) -> None:
        calls = (*SECTION_BEGIN, *SECTION_END, CALL_BEGIN, CALL_END, ARGUMENTS_BEGIN)
        super().__init__((*calls, MESSAGE_END) if tools else (MESSAGE_END,))
        # "between": from the first section or call on, outside of any call
        self._place: Literal["content", "between", "id", "arguments"] = "content"
        self._id = ""
        self._has_arguments = False

    def _text(self, text: str) -> None:
        if self._place == "content":
            self._emit(ContentDelta(text))
        elif self._place == "arguments":
            self._has_arguments = self._has_arguments or bool(text.strip())
            self._arguments(text)
        elif self._place == "id":
            self._id += text
            if len(self._id) > HEADER_LIMIT:
                self._give_up_id()
        else:
            self._stray(text)

    def _marker(self, found: re.Match[str]) -> int:
        marker = found.group()
        if self._place != "id" or not self._start_named(marker):
            self._act(marker)
        return found.end()

    def _start_named(self, marker: str) -> bool:
        """Starts the call that the collected id names, or gives the id up as content; True: the marker is done with."""
        call_id = self._id.strip()
        form = _ID.fullmatch(call_id)
        name = form[1] or form[2] if form else call_id.removeprefix("functions.")
        # without an opening of its arguments only a well-formed id makes a call
        if not name or not (marker == ARGUMENTS_BEGIN or (marker == CALL_END and form)):
            self._give_up_id()
            return False
        self._start_call(call_id, name)
        self._place, self._has_arguments = "arguments", False
        return marker == ARGUMENTS_BEGIN

    def _act(self, marker: str) -> None:
        in_call, in_content = self._place == "arguments", self._place == "content"
        if marker == CALL_BEGIN:
            self._leave("id")
        elif (
            (marker in SECTION_BEGIN and not in_call)
            or (marker in SECTION_END and not in_content)
            or (marker == CALL_END and in_call)
        ):
            self._leave("between")
        elif marker == MESSAGE_END:
            self._leave("content" if in_content else "between")
        else:
            self._text(marker)

    def _leave(self, target: Literal["content", "between", "id"]) -> None:
        if self._place == "arguments" and not self._has_arguments:
            self._arguments("{}")
        self._place, self._id, self._blank = target, "", ""

    def _give_up_id(self) -> None:
        self._place = "between"
        self._stray(CALL_BEGIN + self._id)

    def _end(self) -> None:
        """An id that was cut off names no call, and it was never text."""

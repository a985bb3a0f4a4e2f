"""Reads one streamed answer: which bytes brought how many tokens, and when."""

import json
from typing import Any

from anabranch.evidence.record import RequestRow
from anabranch.evidence.sse import EventParser


class AnswerReader:
    """Fills a row from the bytes of a stream.

    Tokens are counted by the ids that the server names, else by the running count in `usage`, else only at the end from
    the final `usage`; never by chunks, as one chunk may bring none or many.
    """

    def __init__(self, row: RequestRow) -> None:
        self.row, self.done = row, False
        self._events, self._counted, self._total = EventParser(), 0, None
        self._ids: list[int] = []
        self._logprobs: list[float | None] = []
        self._named_ids = self._running_usage = False

    def feed(self, piece: bytes, now: float) -> None:
        """Bytes that arrived at `now`. An error that the server streams ends the answer with it."""
        new, output = 0, False
        for data in self._events.feed(piece):
            if data == "[DONE]":
                self.done = True
                continue
            chunk = _document(data)
            if chunk is None or "error" in chunk:
                self.row.error = f"the server streamed {data[:300]!r}"
                return
            found, has_output = self._chunk(chunk)
            new, output = new + found, output or has_output
        if not (new or output):
            return
        self.row.end_s = now
        if self.row.first_s is None:
            self.row.first_s = now
        if new:
            self.row.arrivals.append(now)
            self.row.counts.append(new)

    def finish(self) -> RequestRow:
        """The row, with an error if the answer did not come to an end or its tokens cannot be counted."""
        row = self.row
        row.output_tokens = self._counted if self._total is None else self._total
        row.token_ids = self._ids if self._named_ids else None
        row.logprobs = self._logprobs or None
        if row.error is None and not self.done and row.finish_reason is None:
            row.error = "the stream ended without a finish_reason"
        elif row.error is None and self._total is None and not self._named_ids:
            row.error = "the server names neither token ids nor usage: its tokens cannot be counted"
        elif row.error is None and self._total not in (None, sum(row.counts)) and row.counts:
            row.error = f"the server counts {self._total} tokens and streamed {sum(row.counts)}"
        return row

    def _chunk(self, chunk: dict[str, Any]) -> tuple[int, bool]:
        """Number of new tokens that the chunk names, and whether it brings any output."""
        output, ids, choices = False, 0, chunk.get("choices") or []
        if choices:
            output, ids = self._choice(choices[0])
        usage = chunk.get("usage")
        if not usage:
            return ids, output
        if choices and not self._named_ids and choices[0].get("finish_reason") is None:
            self._running_usage = True  # a final usage may lie on the last chunk; a running one lies on others, too
        self._take_usage(usage)
        if self._named_ids or not (self._running_usage and choices):
            return ids, output
        new = max(0, usage["completion_tokens"] - self._counted)
        self._counted += new
        return new, output

    def _choice(self, choice: dict[str, Any]) -> tuple[bool, int]:
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        hidden = delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls")
        self.row.text += text
        self.row.finish_reason = choice.get("finish_reason") or self.row.finish_reason
        self._logprobs += _logprobs(choice.get("logprobs"))
        ids = choice.get("token_ids")
        if ids is not None:
            self._named_ids = True
            self._ids += ids
            self._counted += len(ids)
        # an answer whose only token has no text is first seen by its end
        return bool(text or hidden or choice.get("finish_reason")), len(ids or ())

    def _take_usage(self, usage: dict[str, Any]) -> None:
        self._total = usage["completion_tokens"]
        self.row.input_tokens = usage.get("prompt_tokens") or self.row.input_tokens
        details = usage.get("prompt_tokens_details") or {}
        if details.get("cached_tokens") is not None:
            self.row.cached_tokens = details["cached_tokens"]


def _document(data: str) -> dict[str, Any] | None:
    try:
        document = json.loads(data)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _logprobs(document: dict[str, Any] | None) -> list[float | None]:
    """Log probabilities of a choice in either of OpenAI's two forms."""
    if not document:
        return []
    if "content" in document:
        return [entry["logprob"] for entry in document["content"] or ()]
    return list(document.get("token_logprobs") or ())

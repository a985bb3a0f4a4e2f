"""Tokens and their log probabilities in the two forms of OpenAI."""

from collections.abc import Mapping, Sequence
from typing import Any

from anabranch.models.tokenizer import StreamDecoder, Tokenizer

# what OpenAI reports for less; JSON has no infinity
FLOOR = -9999.0


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """A token as text; part of a character is spelled out as its bytes, in OpenAI's notation."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[Mapping[int, float]]
) -> list[dict[str, Any]]:
    """Entries of `logprobs.content` of a chat choice; `tops` may be empty."""
    return [
        _entry(tokenizer, token_id, logprob)
        | {"top_logprobs": [_entry(tokenizer, *pair) for pair in (tops[i] if tops else {}).items()]}
        for i, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True))
    ]


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": token_text(tokenizer, token_id), "logprob": max(logprob, FLOOR), "bytes": list(raw)}


class CompletionLogprobs:
    """`logprobs` of a completion choice, part by part; offsets count characters of the choice's text."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer, self._offset = tokenizer, 0

    def part(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
        tops: Sequence[Mapping[int, float]],
        decoder: StreamDecoder | None,
    ) -> dict[str, list[Any]]:
        """The next tokens; the chosen one is always among its alternatives, None is a first token's log probability."""
        part: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for i, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            part["tokens"].append(token_text(self._tokenizer, token_id))
            part["token_logprobs"].append(None if logprob is None else max(logprob, FLOOR))
            top = None if logprob is None else self._alternatives({token_id: logprob, **(tops[i] if tops else {})})
            part["top_logprobs"].append(top)
            part["text_offset"].append(self._offset)
            self._offset += len(decoder.push(token_id)) if decoder else 0
        return part

    def _alternatives(self, logprobs: Mapping[int, float]) -> dict[str, float]:
        """By text; of two tokens with one text the likelier counts."""
        ordered = sorted(logprobs.items(), key=lambda pair: pair[1])
        return {token_text(self._tokenizer, token_id): max(logprob, FLOOR) for token_id, logprob in ordered}

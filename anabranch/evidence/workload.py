"""What is asked: prompts of exact lengths, a file of prompts, or recorded conversations; the same from one seed."""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

# vocabularies end in special tokens, and some of them mark images
_SPECIAL, _SPECIAL_SHARE = 1024, 8
Encode = Callable[[str], Sequence[int]]
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One request's input, as token ids or as text, and the most tokens of its answer."""

    ids: tuple[int, ...] | None = None
    text: str | None = None
    max_tokens: int

    @property
    def sha256(self) -> str:
        """Of the ids, written as decimal numbers with commas between them, or of the text's UTF-8 bytes."""
        raw = self.text if self.ids is None else ",".join(map(str, self.ids))
        return hashlib.sha256((raw or "").encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class WorkloadSpec:
    """What to ask; names are those of `vllm bench serve`.

    `random_range_ratio` r draws lengths evenly from length * (1 - r) to length * (1 + r); 0 is exact.
    """

    dataset_name: str = "random"
    dataset_path: Path | None = None
    num_prompts: int = 100
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    custom_output_len: int = 256
    vocab_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dataset_name not in ("random", "custom", "sharegpt"):
            raise ValueError(f"dataset_name={self.dataset_name!r}: accepted are random, custom, sharegpt")
        for name in ("num_prompts", "random_input_len", "random_output_len", "custom_output_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: need at least 1")
        if not 0 <= self.random_range_ratio < 1:
            raise ValueError(f"random_range_ratio={self.random_range_ratio}: need 0 <= r < 1")
        if self.random_prefix_len < 0:
            raise ValueError(f"random_prefix_len={self.random_prefix_len}: need 0 or more")
        if self.dataset_name != "random" and self.dataset_path is None:
            raise ValueError(f"dataset_name={self.dataset_name!r} needs dataset_path")

    def prompts(self) -> list[Prompt]:
        """All prompts, the same for the same spec.

        Raises:
            ValueError: the file cannot be read, or random ids are asked for without a vocabulary size.
        """
        if self.dataset_name == "random":
            return self._random()
        assert self.dataset_path is not None
        read = _custom if self.dataset_name == "custom" else _sharegpt
        found = read(self.dataset_path, self.custom_output_len)
        rng = random.Random(self.seed)
        rng.shuffle(found)
        return [found[i % len(found)] for i in range(self.num_prompts)]

    def _random(self) -> list[Prompt]:
        if self.vocab_size is None:
            raise ValueError("random prompts need the vocabulary size: give vocab_size, as the server does not tell it")
        rng = random.Random(self.seed)
        prefix = random_ids(rng, self.random_prefix_len, self.vocab_size)
        prompts = []
        for _ in range(self.num_prompts):
            length, answer = (self._length(rng, n) for n in (self.random_input_len, self.random_output_len))
            prompts.append(Prompt(ids=prefix + random_ids(rng, length, self.vocab_size), max_tokens=answer))
        return prompts

    def _length(self, rng: random.Random, length: int) -> int:
        low, high = round(length * (1 - self.random_range_ratio)), round(length * (1 + self.random_range_ratio))
        return max(1, rng.randint(low, high))


def random_ids(rng: random.Random, length: int, vocab_size: int) -> tuple[int, ...]:
    """Token ids from a vocabulary, its last ones (at most 1024 or an eighth) left out: special tokens are there."""
    usable = max(1, vocab_size - min(_SPECIAL, vocab_size // _SPECIAL_SHARE))
    return tuple(rng.randrange(usable) for _ in range(length))


def as_text(prompts: Sequence[Prompt], decode: Decode) -> list[Prompt]:
    """The same prompts as text, for servers and routes that take no ids; lengths then hold only about."""
    return [p if p.ids is None else Prompt(text=decode(p.ids), max_tokens=p.max_tokens) for p in prompts]


def _lines(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None


def _custom(path: Path, output_len: int) -> list[Prompt]:
    """JSON lines {"prompt": text or ids, "output_tokens": optional}; other lines are prompts as they stand."""
    prompts = []
    for number, line in enumerate(_lines(path).splitlines(), 1):
        if not line.strip():
            continue
        if not line.startswith("{"):
            prompts.append(Prompt(text=line, max_tokens=output_len))
            continue
        try:
            item = json.loads(line)
            text, limit = item["prompt"], int(item.get("output_tokens", output_len))
        except (ValueError, KeyError, TypeError):
            raise ValueError(f'{path} line {number}: need {{"prompt": ..., "output_tokens": ...}}') from None
        ids = None if isinstance(text, str) else tuple(text)
        prompts.append(Prompt(ids=ids, text=text if ids is None else None, max_tokens=limit))
    if not prompts:
        raise ValueError(f"{path}: holds no prompts")
    return prompts


def _sharegpt(path: Path, output_len: int) -> list[Prompt]:
    """First human turn of each conversation. The recorded answer's length in tokens is not known here: `output_len`."""
    try:
        items = json.loads(_lines(path))
        turns = [item.get("conversations", item.get("conversation", [])) for item in items]
        found = [turn[0]["value"] for turn in turns if len(turn) >= 2 and turn[0].get("from") in ("human", "user")]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path}: is not ShareGPT JSON (a list of objects with `conversations`)") from None
    if not found:
        raise ValueError(f"{path}: holds no conversation of two turns that a human begins")
    return [Prompt(text=text, max_tokens=output_len) for text in found]

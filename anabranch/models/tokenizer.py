"""Text to token ids and back, over the `tokenizers` library; byte-level BPE vocabularies only (every Kimi is one).

Ids of plain text can never be special ids: plain text is encoded by a twin tokenizer that knows no added token.
Source of the formats: the released Kimi-Linear and Kimi-K3 tokenizer code and configuration.
"""

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from anabranch.models import tiktoken_convert
from anabranch.models.tiktoken_convert import BYTE_TO_CHAR, add_specials, read_config

# The released tokenizers cut text at these many characters before BPE; the same cuts give the same ids.
TEXT_LIMIT = 400_000
RUN_LIMIT = 25_000

_RUNS = re.compile(r"\s+|\S+")
# U+FFFF for what no byte-level vocabulary contains, so that latin-1 refuses it
_CHAR_TO_BYTE = dict.fromkeys(range(256), "\uffff") | {ord(char): chr(byte) for byte, char in BYTE_TO_CHAR.items()}


class Tokenizer:
    """Encodes and decodes; ids are ints in 0 .. vocab_size - 1.

    Attributes: `special_ids` (name -> id of every added token, those not flagged special too), `vocab_size` (highest
    id + 1), `bos_id`, `eos_id` (from `tokenizer_config.json`, else None; a model's stop id is in its own config).
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: Mapping[str, Any] | None = None) -> None:
        if not isinstance(backend.model, models.BPE):
            raise ValueError(f"a {type(backend.model).__name__} vocabulary is not supported, only byte-level BPE")
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self.special_ids: dict[str, int] = {token.content: token_id for token_id, token in added.items()}
        self._skipped = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes = _byte_table(backend, self.special_ids)
        self.vocab_size = len(self._bytes)
        self.bos_id = self._named_id("bos_token", config or {})
        self.eos_id = self._named_id("eos_token", config or {})
        self._with_specials = backend
        self._plain = _plain_twin(backend, self.special_ids)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a checkpoint directory: `tokenizer.json`, else `tiktoken.model`; `tokenizer_config.json` with either.

        ValueError in one line: neither file, malformed file, vocabulary that is not byte-level BPE.
        """
        directory = Path(path)
        file = directory / "tokenizer.json"
        if file.is_file():
            config = read_config(directory) if (directory / "tokenizer_config.json").is_file() else {}
            return cls(_read_json(file), config)
        if (directory / "tiktoken.model").is_file():
            return cls(tiktoken_convert.build(directory), read_config(directory))
        raise ValueError(f"{directory}: no tokenizer.json and no tiktoken.model")

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Token ids of `text`; with `allow_special` the names of added tokens in it become their ids.

        Without it any text is plain text, `<|im_end|>` included. ValueError: a lone surrogate in the text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text has a lone surrogate at character {error.start}") from error
        backend = self._with_specials if allow_special else self._plain
        pieces = [text] if len(text) <= RUN_LIMIT else _cut(text)
        return [token_id for piece in pieces for token_id in backend.encode(piece, add_special_tokens=False).ids]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; invalid UTF-8 becomes U+FFFD. `skip_special` leaves out the tokens flagged special."""
        return b"".join(self._emitted(token_id, skip_special) for token_id in ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token (of an added token: its name). ValueError: an id without a token."""
        token = self._bytes[token_id] if 0 <= token_id < self.vocab_size else None
        if token is None:
            raise ValueError(f"token id {token_id} is not in the vocabulary (ids 0..{self.vocab_size - 1})")
        return token

    def stream(self, *, skip_special: bool = True) -> "StreamDecoder":
        """A fresh incremental decoder for one sequence."""
        return StreamDecoder(self, skip_special)

    def _emitted(self, token_id: int, skip_special: bool) -> bytes:
        token = self.token_bytes(token_id)
        return b"" if skip_special and token_id in self._skipped else token

    def _named_id(self, key: str, config: Mapping[str, Any]) -> int | None:
        value = config.get(key)
        name = value.get("content") if isinstance(value, Mapping) else value
        if name is None:
            return None
        if name not in self.special_ids:
            raise ValueError(f"tokenizer_config.json: {key} {name!r} is not an added token of the vocabulary")
        return self.special_ids[name]


def has_tokenizer(path: str | Path) -> bool:
    """Whether `Tokenizer.load` would find its files in `path`."""
    return any((Path(path) / name).is_file() for name in ("tokenizer.json", "tiktoken.model"))


class StreamDecoder:
    """Decodes one sequence id by id.

    The pieces joined, `flush()` last, equal the one-shot decode. A character split over tokens is held back until it is
    whole; U+FFFD appears only for bytes that no continuation could make valid.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, perhaps empty. ValueError: an id without a token."""
        return self._decoder.decode(self._tokenizer._emitted(token_id, self._skip_special))

    def flush(self) -> str:
        """The rest, once the sequence has ended; the decoder is then ready for another one."""
        return self._decoder.decode(b"", final=True)


def byte_level_tokenizer(specials: Sequence[tuple[str, bool]]) -> tokenizers.Tokenizer:
    """A vocabulary for tiny random checkpoints: ids 0..255 are the bytes, then `specials` as (name, special flag)."""
    model = models.BPE(vocab={char: byte for byte, char in BYTE_TO_CHAR.items()}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    add_specials(tokenizer, specials, len(BYTE_TO_CHAR))
    return tokenizer


def write_tokenizer_files(
    tokenizer: tokenizers.Tokenizer,
    specials: Sequence[tuple[str, bool]],
    out_dir: str | Path,
    *,
    bos_token: str | None = None,
    eos_token: str | None = None,
) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` in the Hugging Face layout into `out_dir` (made if needed).

    `specials` are the (name, special flag) pairs the tokenizer was built with. ValueError: a name it does not have.
    """
    names = [name for name, _ in specials]
    for name in (*names, *filter(None, (bos_token, eos_token))):
        if tokenizer.token_to_id(name) is None:
            raise ValueError(f"the tokenizer has no token {name!r}")
    entry = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(name)): {"content": name, "special": flag, **entry} for name, flag in specials
        },
    }
    config |= {key: name for key, name in (("bos_token", bos_token), ("eos_token", eos_token)) if name}
    target = Path(out_dir)
    target.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(target / "tokenizer.json"), pretty=False)
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _read_json(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise ValueError(f"{file}: {error}") from error


def _byte_table(backend: tokenizers.Tokenizer, added: Mapping[str, int]) -> list[bytes | None]:
    """Bytes of every id (None for an id without a token); ValueError when a token is not spelled byte-level."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table: list[bytes | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for name, token_id in vocabulary.items():
        try:
            token = name.encode() if name in added else name.translate(_CHAR_TO_BYTE).encode("latin-1")
        except UnicodeEncodeError as error:
            raise ValueError(f"token {token_id} {name!r} is not byte-level, as it has to be") from error
        table[token_id] = token
    return table


def _plain_twin(backend: tokenizers.Tokenizer, added: Mapping[str, int]) -> tokenizers.Tokenizer:
    """The same tokenizer without any added token.

    `encode_special_tokens` would not do: it still matches added tokens not flagged special, as K3's `<|open|>`.
    """
    in_model = {name for name in added if backend.model.token_to_id(name) is not None}
    twin = tokenizers.Tokenizer(backend.model)
    if in_model:
        # the model itself could spell these; leave them and their merges out
        spec = json.loads(backend.to_str())
        model = spec["model"]
        model["vocab"] = {name: token_id for name, token_id in model["vocab"].items() if name not in in_model}
        kept = model["vocab"]
        model["merges"] = [pair for pair in model["merges"] if {*pair, "".join(pair)} <= kept.keys()]
        twin = tokenizers.Tokenizer.from_str(json.dumps(spec | {"added_tokens": [], "post_processor": None}))
    twin.normalizer = backend.normalizer
    twin.pre_tokenizer = backend.pre_tokenizer
    return twin


def _cut(text: str) -> Iterator[str]:
    """Pieces of at most TEXT_LIMIT characters, none with over RUN_LIMIT white-space or other characters in a row."""
    for start in range(0, len(text), TEXT_LIMIT):
        chunk = text[start : start + TEXT_LIMIT]
        done = 0
        for run in _RUNS.finditer(chunk):
            for cut in range(run.start() + RUN_LIMIT, run.end(), RUN_LIMIT):
                yield chunk[done:cut]
                done = cut
        yield chunk[done:]

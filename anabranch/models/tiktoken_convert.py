"""Kimi's `tiktoken.model` vocabulary as a `tokenizers` tokenizer, without running any code of the checkpoint.

Source: the released Kimi-Linear and Kimi-K3 tokenizer code and `tokenizer_config.json` (split pattern, 256 special ids
behind the base vocabulary, names of the unnamed ones). Ids are equal to those of the `tiktoken` package.
"""

import base64
import binascii
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

SPECIAL_RANGE = 256
REMOTE_CODE_KEYS = ("auto_map", "tokenizer_class", "vocab_file")

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_TAIL = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_TAIL}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_TAIL}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def _byte_characters() -> dict[int, str]:
    """The byte-level alphabet (GPT-2): printable Latin-1 bytes stand for themselves, the other 68 for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


BYTE_TO_CHAR = _byte_characters()


def byte_string(token: bytes) -> str:
    """The spelling of a byte token in a byte-level vocabulary."""
    return token.decode("latin-1").translate(BYTE_TO_CHAR)


def reserved_name(token_id: int) -> str:
    """Name of a special id that the checkpoint does not name."""
    return f"<|reserved_token_{token_id}|>"


def read_ranks(path: Path) -> list[bytes]:
    """Reads a `tiktoken.model` file ("base64 rank" lines); entry i of the answer holds the bytes of id i.

    ValueError, naming file and line: unreadable line, bad base64, rank or token used twice, a rank or a byte left out.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    lines: dict[int, int] = {}
    tokens: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        token, rank = _read_line(line, f"{path}:{number}")
        if rank in lines:
            raise ValueError(f"{path}:{number}: rank {rank} is already used on line {lines[rank]}")
        if token in tokens:
            raise ValueError(f"{path}:{number}: token {token!r} already has rank {tokens[token]}")
        lines[rank], tokens[token] = number, rank
    missing = next((rank for rank in range(len(lines)) if rank not in lines), None)
    if missing is not None:
        beyond = min(rank for rank in lines if rank > missing)
        raise ValueError(f"{path}:{lines[beyond]}: rank {beyond} leaves a gap, no line has rank {missing}")
    absent = next((byte for byte in range(256) if bytes([byte]) not in tokens), None)
    if absent is not None:
        raise ValueError(f"{path}:{len(lines)}: the file ends without a token for byte 0x{absent:02x}")
    return sorted(tokens, key=tokens.__getitem__)


def _read_line(line: bytes, where: str) -> tuple[bytes, int]:
    fields = line.split()
    if len(fields) != 2 or not fields[1].isdigit():
        raise ValueError(f"{where}: expected 'base64 rank', got {line[:60].decode('latin-1')!r}")
    try:
        token = base64.b64decode(fields[0], validate=True)
    except binascii.Error as error:
        raise ValueError(f"{where}: bad base64 {fields[0][:60].decode('latin-1')!r} ({error})") from error
    if not token:
        raise ValueError(f"{where}: empty token")
    return token, int(fields[1])


def read_config(directory: Path) -> dict[str, Any]:
    """The checkpoint's `tokenizer_config.json`; ValueError when it is missing or is not a JSON object."""
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: bad JSON ({error.msg})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}:1: expected a JSON object")
    return config


def read_specials(config: dict[str, Any], first_id: int, path: Path) -> list[tuple[str, bool]]:
    """(name, special flag) of ids first_id .. first_id + 255, from `added_tokens_decoder` and the reserved names."""
    named: dict[int, tuple[str, bool]] = {}
    for key, entry in config.get("added_tokens_decoder", {}).items():
        if not key.isdigit() or not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise ValueError(f"{path}: added_tokens_decoder entry {key!r} needs an id and a content string")
        if not first_id <= int(key) < first_id + SPECIAL_RANGE:
            last = first_id + SPECIAL_RANGE - 1
            raise ValueError(f"{path}: added_tokens_decoder id {key} is outside the special range {first_id}..{last}")
        named[int(key)] = (entry["content"], bool(entry.get("special", False)))
    ids = range(first_id, first_id + SPECIAL_RANGE)
    return [named.get(token_id, (reserved_name(token_id), True)) for token_id in ids]


def merges_of(tokens: Sequence[bytes]) -> Iterable[tuple[str, str]]:
    """Every split of every token into two tokens, in rank order.

    tiktoken joins the neighbours whose concatenation has the lowest rank, however that token was first built, so every
    split is a merge; one canonical split a token gives other ids on vocabularies that are not a plain BPE training.
    """
    names = {token: byte_string(token) for token in tokens}
    for token in tokens:
        for cut in range(1, len(token)):
            left, right = names.get(token[:cut]), names.get(token[cut:])
            if left is not None and right is not None:
                yield left, right


def add_specials(tokenizer: tokenizers.Tokenizer, specials: Sequence[tuple[str, bool]], first_id: int) -> None:
    """Adds (name, special flag) pairs as ids first_id, first_id + 1, ...; ValueError when a name is taken already."""
    tokenizer.add_tokens([AddedToken(name, special=flag, normalized=False) for name, flag in specials])
    for token_id, (name, _) in enumerate(specials, start=first_id):
        if tokenizer.token_to_id(name) != token_id:
            raise ValueError(f"special token name {name!r} of id {token_id} is empty or names another token")


def build(directory: Path) -> tokenizers.Tokenizer:
    """A `tokenizers` tokenizer from `tiktoken.model` and `tokenizer_config.json` in `directory`."""
    tokens = read_ranks(directory / "tiktoken.model")
    specials = read_specials(read_config(directory), len(tokens), directory / "tokenizer_config.json")
    vocabulary = {byte_string(token): rank for rank, token in enumerate(tokens)}
    # ignore_merges: tiktoken looks a whole piece up before it tries any merge
    model = models.BPE(vocab=vocabulary, merges=list(merges_of(tokens)), ignore_merges=True)
    tokenizer = tokenizers.Tokenizer(model)
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    add_specials(tokenizer, specials, len(tokens))
    return tokenizer


def convert(directory: str | Path, out_dir: str | Path) -> None:
    """Writes `tokenizer.json` for the checkpoint in `directory` into `out_dir` (made if needed).

    Into another directory it also brings the chat template and a `tokenizer_config.json` without the remote-code keys;
    inside the checkpoint itself nothing else is touched.
    """
    source, target = Path(directory), Path(out_dir)
    tokenizer = build(source)
    target.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(target / "tokenizer.json"), pretty=False)
    if target.resolve() == source.resolve():
        return
    config = {key: value for key, value in read_config(source).items() if key not in REMOTE_CODE_KEYS}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
    if (source / "chat_template.jinja").is_file():
        shutil.copy(source / "chat_template.jinja", target)

"""Converted vocabularies against the `tiktoken` package, which reads the same ranks itself."""
# ruff: noqa: RUF001 - look-alike characters are what these texts are for

import base64
import json
import random
from collections.abc import Iterable
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from anabranch.models import tiktoken_convert
from anabranch.models.tokenizer import Tokenizer, _cut

# Written out a second time, so that a slip in the package's pattern shows.
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

CORPUS = """The channel leaves the river, and it joins the river again. It's where they'll meet; we've SEEN IT'S fine.
河道离开主流，又在下游汇合。推理引擎把投影融合在一起，并且证明结果没有变化。漢字かな交じり文です。
한국어 문장도 있습니다. naïve café, Ünïcödé, МОСКВА река, ελληνικά, עברית, العربية.
def encode(text: str) -> list[int]:
    return [ranks[piece] for piece in split(text)]  # 3.14159 1234567890 0xFF 2025-11-29
Smile 😀 family 👨\u200d👩\u200d👧\u200d👦 flag 🇨🇳 thumbs 👍🏽 heart ❤\ufe0f
"""
CORPUS *= 3

SAMPLES = [
    "",
    " ",
    "\n\n  \r\n\t x",
    "Hello你好World 中文abc 12345 it's I'LL HTTPServer iPhone",
    "a 漢字かな混じり「引用」。 ㍿ 々〆 〇 ㊙",
    "👨\u200d👩\u200d👧\u200d👦 👍🏽 🇨🇳 e\u0301 क्षि ﬁ Ǆ ǅ ß ſ it'ſ you'Re",
    "for (int i=0;i<10;++i) {\r\n\tx[i] = 'a';  // !!!\n}",
    "1 12 123 1234 ١٢٣٤ ½ Ⅷ x²",
    "\u2028\u00a0\u3000\u0085\u200b\u180e end",
    "<|im_end|> and [BOS] and <|reserved_token_700|>",
]


def spell(char: str) -> int:
    """Byte of a byte-level character, from the tokenizers library's own decoder."""
    return next(byte for byte, known in tiktoken_convert.BYTE_TO_CHAR.items() if known == char)


def write_checkpoint(directory: Path, tokens: Iterable[bytes], named: dict[int, tuple[str, bool]]) -> Path:
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    (directory / "tiktoken.model").write_bytes(b"".join(lines))
    added = {str(token_id): {"content": name, "special": flag} for token_id, (name, flag) in named.items()}
    config = {"added_tokens_decoder": added, "auto_map": {"AutoTokenizer": ["remote.Code", None]}}
    config |= {
        "tokenizer_class": "TikTokenTokenizer",
        "bos_token": "[BOS]",
        "eos_token": {"__type": "AddedToken", "content": "[EOS]"},
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def train(size: int) -> list[bytes]:
    backend = Backend(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS.splitlines(keepends=True), trainer)
    vocabulary = backend.get_vocab()
    return [bytes(map(spell, name)) for name in sorted(vocabulary, key=vocabulary.__getitem__)]


TOKENS = train(900)
BASE = len(TOKENS)
NAMED = {
    BASE: ("[BOS]", True),
    BASE + 1: ("[EOS]", True),
    BASE + 2: ("<|im_end|>", True),
    BASE + 3: ("<|open|>", False),
}
SPECIALS = {name: token_id for token_id, (name, _) in NAMED.items()}
SPECIALS |= {f"<|reserved_token_{i}|>": i for i in range(BASE, BASE + 256) if i not in NAMED}
ORACLE = tiktoken.Encoding(
    "oracle",
    pat_str=PATTERN,
    mergeable_ranks={token: rank for rank, token in enumerate(TOKENS)},
    special_tokens=SPECIALS,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("kimi"), TOKENS, NAMED)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(checkpoint)


def test_the_trained_vocabulary_is_worth_testing() -> None:
    assert BASE > 600
    assert max(map(len, TOKENS)) > 12
    assert {b" river", b"'s", b"123"} <= set(TOKENS)
    assert any(
        len(text) >= 3 and "一" <= text[0] <= "鿿" for text in (token.decode("utf-8", "ignore") for token in TOKENS)
    )


@pytest.mark.parametrize("text", [*SAMPLES, CORPUS])
def test_ids_equal_tiktoken(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == ORACLE.encode(text, disallowed_special=())
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", SAMPLES)
def test_ids_equal_tiktoken_with_specials(tokenizer: Tokenizer, text: str) -> None:
    text = f"<|im_end|>{text}<|open|>[BOS] {text}<|reserved_token_{BASE + 200}|>"
    ids = tokenizer.encode(text, allow_special=True)
    assert ids == ORACLE.encode(text, allowed_special="all")
    assert {BASE, BASE + 2, BASE + 3, BASE + 200} <= set(ids)


words = st.sampled_from(
    ["'s", "'LL", "it", " The", "引擎", "河", "\n", "  ", "123", "👍🏽", "<|im_end|>", "[BOS]", "é", "А"]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(words | st.text(max_size=8), max_size=12).map("".join))
def test_ids_equal_tiktoken_on_any_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == ORACLE.encode(text, disallowed_special=())
    assert max(ids, default=0) < BASE
    assert tokenizer.encode(text, allow_special=True) == ORACLE.encode(text, allowed_special="all")
    assert tokenizer.decode(ids) == text


def test_split_is_the_same_for_code_points_of_every_kind(tmp_path: Path) -> None:
    # every pair of bytes is a token, in random order: a piece cut elsewhere pairs its bytes in another way
    pairs = [bytes([left, right]) for left in range(256) for right in range(256)]
    random.Random(0).shuffle(pairs)
    tokens = [*(bytes([byte]) for byte in range(256)), *pairs]
    ours = Tokenizer.load(
        write_checkpoint(tmp_path, tokens, {len(tokens): ("[BOS]", True), len(tokens) + 1: ("[EOS]", True)})
    )
    ranks = {token: rank for rank, token in enumerate(tokens)}
    oracle = tiktoken.Encoding("pairs", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    points = [*range(0x500), *range(0x500, 0xD800, 11), *range(0xE000, 0x33500, 41)]
    for char in map(chr, points):
        text = (
            f"{char}|a{char}b|A{char}a {char}{char}1|1{char}2|\n{char}\n|x{char} {char}.|中{char}文|'{char}s|.{char}B"
        )
        assert ours.encode(text) == oracle.encode_ordinary(text), hex(ord(char))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text("ab c", min_size=2, max_size=6), min_size=1, max_size=14, unique=True),
    st.lists(st.text("ab c", max_size=30), min_size=1, max_size=20),
)
def test_ids_equal_tiktoken_for_ranks_that_no_training_made(
    tmp_path_factory: pytest.TempPathFactory, extra: list[str], texts: list[str]
) -> None:
    tokens = [*(bytes([byte]) for byte in range(256)), *(text.encode() for text in extra)]
    named = {len(tokens): ("[BOS]", True), len(tokens) + 1: ("[EOS]", True)}
    ours = Tokenizer.load(write_checkpoint(tmp_path_factory.mktemp("ranks"), tokens, named))
    ranks = {token: rank for rank, token in enumerate(tokens)}
    oracle = tiktoken.Encoding("ranks", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    for text in texts:
        assert ours.encode(text) == oracle.encode_ordinary(text)


def released_cuts(text: str) -> list[str]:
    """The cuts of long input as the released tokenizers describe them, one character at a time."""
    pieces: list[str] = []
    for start in range(0, len(text), 400_000):
        piece, run, was_space = "", 0, None
        for char in text[start : start + 400_000]:
            run = run + 1 if char.isspace() == was_space else 1
            was_space = char.isspace()
            if run > 25_000:
                pieces.append(piece)
                piece, run = "", 1
            piece += char
        pieces.append(piece)
    return pieces


@pytest.mark.parametrize(
    "text",
    [
        "the river " * 5000,
        "x" + "river" * 11000 + " \x1c\u3000" * 20000 + "。end",
        "ab" * 12_500,
        "ab" * 12_500 + "c",
        "the river " * 41000,
    ],
)
def test_long_text_is_cut_as_released(tokenizer: Tokenizer, text: str) -> None:
    pieces = released_cuts(text)
    assert list(_cut(text)) == pieces
    assert tokenizer.encode(text) == [i for piece in pieces for i in ORACLE.encode(piece, disallowed_special=())]


def test_a_cut_changes_ids(tokenizer: Tokenizer) -> None:
    text = "rivers" * 11000
    assert tokenizer.encode(text) != ORACLE.encode(text, disallowed_special=())


def test_special_range(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_ids == SPECIALS
    assert tokenizer.vocab_size == BASE + 256
    assert (tokenizer.bos_id, tokenizer.eos_id) == (BASE, BASE + 1)
    ids = [BASE + 2, BASE + 3, BASE + 9]
    assert tokenizer.decode(ids) == "<|open|>"
    assert tokenizer.decode(ids, skip_special=False) == f"<|im_end|><|open|><|reserved_token_{BASE + 9}|>"


def test_convert_to_another_directory(checkpoint: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (checkpoint / "chat_template.jinja").write_text("{{ messages }}")
    tiktoken_convert.convert(checkpoint, tmp_path / "out")
    (checkpoint / "chat_template.jinja").unlink()
    again = Tokenizer.load(tmp_path / "out")
    text = "<|im_end|>" + CORPUS + "<|open|>"
    assert again.encode(text, allow_special=True) == tokenizer.encode(text, allow_special=True)
    assert again.encode(text) == tokenizer.encode(text)
    assert (again.bos_id, again.eos_id, again.special_ids) == (tokenizer.bos_id, tokenizer.eos_id, SPECIALS)
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "auto_map" not in config
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_converted_files_load_in_transformers(checkpoint: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tiktoken_convert.convert(checkpoint, tmp_path)
    fast = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = CORPUS + "<|im_end|><|open|>x"
    ids = tokenizer.encode(text, allow_special=True)
    assert fast.encode(text, add_special_tokens=False) == ids
    assert fast.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)


def test_convert_in_place_adds_one_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TOKENS, NAMED)
    before = (tmp_path / "tokenizer_config.json").read_bytes()
    tiktoken_convert.convert(tmp_path, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"tiktoken.model", "tokenizer.json", "tokenizer_config.json"}
    assert (tmp_path / "tokenizer_config.json").read_bytes() == before


BYTES = [base64.b64encode(bytes([byte])).decode() + f" {byte}" for byte in range(256)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*BYTES, "a== 256"], "tiktoken.model:257: bad base64"),
        ([*BYTES, "Y?WI= 256"], "tiktoken.model:257: bad base64"),
        ([*BYTES, "YWI= 255"], "tiktoken.model:257: rank 255 is already used on line 256"),
        ([*BYTES, "YQ== 256"], "tiktoken.model:257: token b'a' already has rank 97"),
        ([*BYTES, "", "YWI= 258"], "tiktoken.model:258: rank 258 leaves a gap, no line has rank 256"),
        ([*BYTES, "YWI="], "tiktoken.model:257: expected 'base64 rank'"),
        ([*BYTES, "YWI= -1"], "tiktoken.model:257: expected 'base64 rank'"),
        (BYTES[:255], "tiktoken.model:255: the file ends without a token for byte 0xff"),
        ([], "tiktoken.model:0: the file ends without a token for byte 0x00"),
    ],
)
def test_malformed_ranks(tmp_path: Path, lines: list[str], message: str) -> None:
    (tmp_path / "tiktoken.model").write_text("\n".join(lines))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tiktoken\.model:") as error:
        Tokenizer.load(tmp_path)
    assert message in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "no such file"),
        ("{\n  oops}", "tokenizer_config.json:2: bad JSON"),
        ("[]", "expected a JSON object"),
        ('{"added_tokens_decoder": {"5": {"content": "x"}}}', "id 5 is outside the special range 256..511"),
        ('{"added_tokens_decoder": {"512": {"content": "x"}}}', "id 512 is outside the special range 256..511"),
        ('{"added_tokens_decoder": {"256": {}}}', "entry '256' needs an id and a content string"),
        (
            '{"added_tokens_decoder": {"256": {"content": "x x"}, "260": {"content": "x x"}}}',
            "'x x' of id 260 is empty or names another token",
        ),
        ('{"added_tokens_decoder": {"256": {"content": "a"}}}', "'a' of id 256 is empty or names another token"),
        ('{"bos_token": "[BOS]"}', "bos_token '[BOS]' is not an added token"),
    ],
)
def test_malformed_config(tmp_path: Path, config: str | None, message: str) -> None:
    (tmp_path / "tiktoken.model").write_text("\n".join(BYTES))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json|special token") as error:
        Tokenizer.load(tmp_path)
    assert message in str(error.value)


def test_missing_ranks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tiktoken\.model: no such file"):
        tiktoken_convert.convert(tmp_path, tmp_path)

"""Byte-level tokenizers: encoding that text cannot inject into, decoding, streaming, files."""
# ruff: noqa: RUF001 - look-alike characters are what these texts are for

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers

from anabranch.models.tokenizer import Tokenizer, byte_level_tokenizer, write_tokenizer_files

SPECIALS = [("[BOS]", True), ("[EOS]", True), ("<|im_end|>", True), ("<|open|>", False), ("<é ü>", True)]
END, OPEN, ACCENT = 258, 259, 260
HARD_TEXTS = [
    "",
    "a",
    "你好，世界",
    "👨\u200d👩\u200d👧\u200d👦",
    "👍🏽🇨🇳",
    "e\u0301\u200d",
    "\x00\x7f\n\r",
    "<|im_end|>",
    "<é ü>[BOS]",
    "\ufffd",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_tokenizer(SPECIALS), {"bos_token": "[BOS]", "eos_token": {"content": "[EOS]"}})


def stream(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    decoder = tokenizer.stream(skip_special=skip_special)
    return [*(decoder.push(token_id) for token_id in ids), decoder.flush()]


def test_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_ids == {"[BOS]": 256, "[EOS]": 257, "<|im_end|>": 258, "<|open|>": 259, "<é ü>": 260}
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (261, 256, 257)
    assert [tokenizer.token_bytes(token_id) for token_id in range(256)] == [bytes([byte]) for byte in range(256)]
    assert tokenizer.token_bytes(ACCENT) == "<é ü>".encode()
    bare = Tokenizer(byte_level_tokenizer([]))
    assert (bare.vocab_size, bare.special_ids, bare.bos_id, bare.eos_id) == (256, {}, None, None)


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_plain_text_is_its_bytes(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text() | st.lists(st.sampled_from([*HARD_TEXTS, "<|open|>"])).map("".join))
@settings(deadline=None)
def test_any_text_round_trips_without_specials(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    with_specials = tokenizer.encode(text, allow_special=True)
    assert tokenizer.decode(with_specials, skip_special=False) == text


def test_specials_only_where_allowed(tokenizer: Tokenizer) -> None:
    text = "a<|im_end|><|open|>b<é ü>"
    assert tokenizer.encode(text, allow_special=True) == [97, END, OPEN, 98, ACCENT]
    assert not set(tokenizer.encode(text)) & set(tokenizer.special_ids.values())


def test_decode_skips_special_but_not_other_added_tokens(tokenizer: Tokenizer) -> None:
    ids = [97, END, OPEN, 98, 256, ACCENT]
    assert tokenizer.decode(ids) == "a<|open|>b"
    assert tokenizer.decode(ids, skip_special=False) == "a<|im_end|><|open|>b[BOS]<é ü>"


def test_special_that_the_vocabulary_can_spell(tmp_path: Path) -> None:
    backend = byte_level_tokenizer([])
    spec = json.loads(backend.to_str())
    spec["model"] |= {"ignore_merges": True, "merges": [["a", "b"], ["ab", "c"], ["x", "y"], ["xy", "ab"]]}
    spec["model"]["vocab"] |= {"ab": 256, "abc": 257, "xy": 258, "xyab": 259, "stop": 260}
    backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
    backend.add_special_tokens(["stop", "ab"])
    backend.enable_truncation(3)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.special_ids == {"stop": 260, "ab": 256}
    assert tokenizer.encode("stop", allow_special=True) == [260]
    assert tokenizer.encode("stop") == list(b"stop")
    assert tokenizer.encode("abc ab") == list(b"abc ab")
    assert tokenizer.encode("xyz") == [258, ord("z")]
    assert tokenizer.decode([260, 257, 259, 256], skip_special=False) == "stopabcxyabab"


def test_a_saved_truncation_or_padding_is_not_applied(tmp_path: Path) -> None:
    backend = byte_level_tokenizer(SPECIALS)
    backend.enable_truncation(3)
    backend.enable_padding(pad_id=256, length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("abcdef") == list(b"abcdef")
    assert tokenizer.encode("abcd", allow_special=True) == list(b"abcd")


def test_lone_surrogate(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="lone surrogate at character 2"):
        tokenizer.encode("ab\ud800")


@pytest.mark.parametrize("token_id", [-1, 261, 10**9])
def test_unknown_ids(tokenizer: Tokenizer, token_id: int) -> None:
    for call in (tokenizer.token_bytes, lambda i: tokenizer.decode([97, i]), tokenizer.stream().push):
        with pytest.raises(ValueError, match=f"token id {token_id} is not in the vocabulary"):
            call(token_id)


def test_a_hole_in_the_vocabulary_is_an_unknown_id(tmp_path: Path) -> None:
    spec = json.loads(byte_level_tokenizer([]).to_str())
    spec["model"]["vocab"]["ab"] = 300
    backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
    assert Tokenizer(backend).token_bytes(300) == b"ab"
    with pytest.raises(ValueError, match="token id 299"):
        Tokenizer(backend).decode([299])


any_ids = st.lists(st.integers(0, 260), max_size=40)
text_ids = st.lists(st.sampled_from(HARD_TEXTS) | st.text(max_size=5)).map(lambda texts: list("".join(texts).encode()))


@given(
    any_ids | text_ids | st.tuples(text_ids, any_ids, text_ids).map(lambda parts: [*parts[0], *parts[1], *parts[2]]),
    st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_stream_equals_one_shot_decode(tokenizer: Tokenizer, ids: list[int], skip_special: bool) -> None:
    pieces = stream(tokenizer, ids, skip_special)
    whole = tokenizer.decode(ids, skip_special=skip_special)
    assert "".join(pieces) == whole
    raw = b"".join(b"" if skip_special and i in (256, 257, END, ACCENT) else tokenizer.token_bytes(i) for i in ids)
    assert whole == raw.decode("utf-8", "replace")


@given(st.text(st.characters(exclude_characters="\ufffd", codec="utf-8")))
@settings(deadline=None)
def test_stream_of_text_is_prompt_and_never_shows_a_replacement(tokenizer: Tokenizer, text: str) -> None:
    decoder = tokenizer.stream()
    for char in text:
        *first, last = char.encode()
        assert [decoder.push(byte) for byte in first] == [""] * len(first)
        assert decoder.push(last) == char
    assert decoder.flush() == ""


@pytest.mark.parametrize(
    ("ids", "pieces"),
    [
        ([0xE4, 0xBD, 0xA0], ["", "", "你", ""]),
        ([0xE4, 0xBD], ["", "", "\ufffd"]),
        ([0xE4, 0x41], ["", "\ufffdA", ""]),
        ([0xFF, 0x41], ["\ufffd", "A", ""]),
        ([0xF0, 0x9F, 0xE4, 0xBD, 0xA0], ["", "", "\ufffd", "", "你", ""]),
        ([0xE4, END, 0xBD, 0xA0], ["", "", "", "你", ""]),
        ([0xE4, OPEN], ["", "\ufffd<|open|>", ""]),
    ],
)
def test_stream_pieces(tokenizer: Tokenizer, ids: list[int], pieces: list[str]) -> None:
    assert stream(tokenizer, ids) == pieces


def test_stream_starts_afresh_after_flush(tokenizer: Tokenizer) -> None:
    decoder = tokenizer.stream()
    assert (decoder.push(0xE4), decoder.flush(), decoder.push(97), decoder.flush()) == ("", "\ufffd", "a", "")


def test_files_load_here_and_in_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    backend = byte_level_tokenizer(SPECIALS)
    write_tokenizer_files(backend, SPECIALS, tmp_path / "tiny", bos_token="[BOS]", eos_token="[EOS]")
    ours = Tokenizer.load(tmp_path / "tiny")
    assert (ours.bos_id, ours.eos_id, ours.special_ids) == (256, 257, tokenizer.special_ids)
    fast = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tiny")
    assert (fast.bos_token_id, fast.eos_token_id, len(fast)) == (256, 257, 261)
    text = "x 你好<|im_end|>👍🏽 <|open|> .y"
    ids = tokenizer.encode(text, allow_special=True)
    assert ours.encode(text, allow_special=True) == ids
    assert fast.encode(text, add_special_tokens=False) == ids
    assert fast.decode(ids, skip_special_tokens=True) == ours.decode(ids) == "x 你好👍🏽 <|open|> .y"
    config = json.loads((tmp_path / "tiny" / "tokenizer_config.json").read_text())
    flags = {int(key): (entry["content"], entry["special"]) for key, entry in config["added_tokens_decoder"].items()}
    assert flags == dict(enumerate(SPECIALS, start=256))


def test_write_refuses_names_that_the_tokenizer_lacks(tmp_path: Path) -> None:
    backend = byte_level_tokenizer(SPECIALS)
    with pytest.raises(ValueError, match=r"no token '\[PAD\]'"):
        write_tokenizer_files(backend, [*SPECIALS, ("[PAD]", True)], tmp_path)
    with pytest.raises(ValueError, match="no token '<s>'"):
        write_tokenizer_files(backend, SPECIALS, tmp_path, bos_token="<s>")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("specials", [[("x1", True), ("x1", False)], [("a", True)], [("", True)]])
def test_special_names_must_be_new(specials: list[tuple[str, bool]]) -> None:
    with pytest.raises(ValueError, match="is empty or names another token"):
        byte_level_tokenizer(specials)


def test_load_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json and no tiktoken\.model"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: "):
        Tokenizer.load(tmp_path)


def test_other_kinds_of_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="WordLevel vocabulary is not supported"):
        Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    sentencepiece = tokenizers.Tokenizer(models.BPE({"a": 0, "▁b": 1}, []))
    sentencepiece.pre_tokenizer = pre_tokenizers.Metaspace()
    with pytest.raises(ValueError, match="token 1 '▁b' is not byte-level"):
        Tokenizer(sentencepiece)
    spaced = tokenizers.Tokenizer(models.BPE({"a": 0, " ": 1}, []))
    with pytest.raises(ValueError, match="token 1 ' ' is not byte-level"):
        Tokenizer(spaced)


def test_bos_must_exist() -> None:
    backend = byte_level_tokenizer(SPECIALS)
    backend.add_tokens([AddedToken("<s>", special=True)])
    assert Tokenizer(backend, {"bos_token": "<s>"}).bos_id == 261
    with pytest.raises(ValueError, match="eos_token '</s>' is not an added token"):
        Tokenizer(backend, {"eos_token": "</s>"})

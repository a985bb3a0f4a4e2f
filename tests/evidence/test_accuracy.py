"""GSM8K: files, prompts to the byte, the extraction rule, and pairing."""

import asyncio
import hashlib
import json
import re
from decimal import Decimal

import pytest
from helpers.scripted import Running, Script

from anabranch.evidence.accuracy import summarise
from anabranch.evidence.gsm8k import TEST_SHA256, extract, load_test
from anabranch.evidence.prove import prove_accuracy
from anabranch.evidence.rundir import RunDir
from anabranch.evidence.targets import parse_targets


@pytest.mark.parametrize(("text", "number"), [
    ("so 3*4=12.\n#### 12", "12"),
    ("#### -1,234.50 and 7", "-1234.50"),
    ("#### $7\n#### 8", "7"),
    ("he pays $1,500.", "1500"),
    ("first 3, then 4\n\nQuestion: what of 99?", "4"),
    ("none", None),
    ("", None),
])  # fmt: skip
def test_extraction(text, number):
    assert extract(text) == (None if number is None else Decimal(number))


def test_the_fixture():
    test = load_test()
    assert (len(test.questions), len(test.shots)) == (16, 5)
    assert not {q.question for q in test.questions} & {s.question for s in test.shots}
    for question in (*test.questions, *test.shots):
        for left, right in re.findall(r"<<(.*?)=(.*?)>>", question.answer):
            assert eval(left) == pytest.approx(float(right)), question.answer
        assert extract(question.answer) == question.number
    prompt = test.prompt(test.questions[0])
    assert prompt.startswith(f"Question: {test.shots[0].question}\nAnswer: ")
    assert prompt.endswith(f"\n\nQuestion: {test.questions[0].question}\nAnswer:")
    assert prompt.count("Question:") == 6


def test_data_are_checked_by_their_hash(tmp_path):
    raw = b'{"question": "q?", "answer": "#### 3"}\n'
    (tmp_path / "d.jsonl").write_bytes(raw)
    with pytest.raises(ValueError, match=TEST_SHA256):
        load_test(tmp_path / "d.jsonl")
    test = load_test(tmp_path / "d.jsonl", hashlib.sha256(raw).hexdigest(), count=0)
    assert test.prompt(test.questions[0]) == "Question: q?\nAnswer:"
    (tmp_path / "d.jsonl").write_bytes(b'{"question": "q?", "answer": "three"}\n')
    with pytest.raises(ValueError, match="line 1"):
        load_test(tmp_path / "d.jsonl", hashlib.sha256((tmp_path / "d.jsonl").read_bytes()).hexdigest())
    with pytest.raises(ValueError, match="the file has 5"):
        load_test(count=6)
    with pytest.raises(ValueError, match="cannot be read"):
        load_test(tmp_path / "none")


def rows(*correct: int) -> list[dict]:
    return [{"correct": bool(c), "text": str(c), "error": None, "finish_reason": "stop"} for c in correct]


def test_pairing():
    found = summarise(load_test(limit=4), {
        "a": [rows(1, 1, 0, 0), rows(1, 1, 1, 0), rows(1, 0, 0, 0)],
        "b": [rows(1, 0, 0, 1), rows(1, 1, 0, 0), rows(0, 0, 0, 0)],
    })  # fmt: skip
    assert found["arms"]["a"]["scores_pct"] == [50.0, 75.0, 25.0]
    assert found["arms"]["a"]["mean_pct"] == found["arms"]["a"]["median_pct"] == 50.0
    assert [(p["only_a"], p["only_b"]) for p in found["pairs"]] == [(1, 1), (1, 0), (1, 0)]
    assert found["pairs"][0] == {
        "only_a": 1, "only_b": 1, "mcnemar_p": 1.0, "difference_points": 0.0, "identical_texts": 2,
    }  # fmt: skip
    assert (found["majority"]["only_a"], found["majority"]["only_b"]) == (1, 0)


class Silent:
    def run(self, *_):
        pass

    def step(self, *_):
        pass


def test_two_servers(tmp_path):
    """A always says 43, which one question of the fixture wants; B always says nothing that counts."""
    test = load_test()
    with Running(Script(ttft=0, tpot=0, answer="#### 43")) as a, Running(Script(ttft=0, tpot=0, answer="no")) as b:
        targets = parse_targets([a.url, b.url])
        place = RunDir.start(tmp_path, targets.text)
        options = {"starts": 2, "concurrency": 4, "max_tokens": 3}
        found = asyncio.run(prove_accuracy(targets, test, place, Silent(), **options)).accuracy
        body = a.app.bodies[-1]
    assert found["arms"]["a"]["scores_pct"] == [100 / 16] * 2
    assert found["arms"]["b"]["scores_pct"] == [0.0] * 2
    assert [(p["only_a"], p["only_b"], p["identical_texts"]) for p in found["pairs"]] == [(1, 0, 0)] * 2
    assert found["prompts_sha256"] == test.prompts_sha256
    assert (body["stop"], body["temperature"], body.get("ignore_eos")) == (["Question:"], 0.0, None)
    kept = place.read_rows("accuracy", "a-2")
    assert sum(row["correct"] for row in kept) == 1
    assert json.loads((tmp_path / "summary.json").read_text())["accuracy"]["first_prompt"].endswith("Answer:")

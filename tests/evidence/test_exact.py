"""Equal tokens, one planted token, and a mode that is no oracle."""

import asyncio

import pytest
from helpers.scripted import Running, Script

from anabranch.evidence import exact
from anabranch.evidence.prove import prove_exact
from anabranch.evidence.rundir import RunDir
from anabranch.evidence.spec import ExactSpec
from anabranch.evidence.targets import parse_targets

QUICK = {"ttft": 0.0, "tpot": 0.0}
SPEC = ExactSpec(prompts=6, input_len=5, tokens=8, concurrent=4)


class Silent:
    def run(self, *_):
        pass

    def step(self, *_):
        pass


def prove(tmp_path, a: Script, b: Script | None = None, spec=SPEC):
    with Running(a) as first, Running(b or a) as second:
        targets = parse_targets([first.url, second.url] if b else [first.url])
        place = RunDir.start(tmp_path / "run", targets.text)
        found = asyncio.run(prove_exact(targets, spec, place, Silent())).exact
        return found, place, first.app


def test_equal_servers(tmp_path):
    found, place, app = prove(tmp_path, Script(**QUICK), Script(**QUICK, group=3))
    assert (found["verdict"], found["oracle"]) == ("identical", True)
    pair = found["pairs"][0]
    assert (pair["inputs"], pair["identical_outputs"], pair["tokens"], pair["identical_tokens"]) == (10, 10, 80, 80)
    assert (pair["logprobs"], pair["identical_logprobs"], pair["max_logprob_diff"]) == (80, 80, 0.0)
    assert 1 < app.most_open <= 4  # how many meet is up to the machine
    rows = place.read_rows("exact", "a-1")
    assert [row["case"] for row in rows][:2] == ["prompt-0", "prompt-1"]
    assert all(len(row["output_sha256"]) == 64 and len(row["logprobs"]) == 8 for row in rows)


def test_one_token_is_caught(tmp_path):
    found, _, _ = prove(tmp_path, Script(**QUICK), Script(**QUICK, wrong_token_at=5))
    assert (found["verdict"], found["oracle"]) == ("different", True)
    pair = found["pairs"][0]
    wrong = pair["inputs"] - pair["identical_outputs"]
    assert 1 <= wrong < pair["inputs"]
    assert pair["tokens"] - pair["identical_tokens"] == wrong
    assert pair["max_logprob_diff"] == pytest.approx(0.001)
    first = pair["first_difference"]
    assert (first["unit"], first["position"], first["b"]) == ("token", 5, first["a"] + 1)


def test_a_mode_that_diverges_from_itself_is_no_oracle(tmp_path):
    found, _, _ = prove(tmp_path, Script(**QUICK, random_tokens=True), Script(**QUICK))
    assert not found["oracle"]
    assert "A/A itself diverges" in found["verdict"]


def test_one_server_is_compared_with_itself(tmp_path):
    found, _, _ = prove(tmp_path, Script(**QUICK))
    assert found["verdict"] == "A/A identical; no B was asked"


def test_failed_answers_are_not_identical(tmp_path):
    found, _, _ = prove(tmp_path, Script(**QUICK, cut={4}))
    assert not found["control"][0]["identical"]
    assert found["control"][0]["failed"] == 1


def test_rows_that_are_there_are_not_asked_again(tmp_path):
    with Running(**QUICK) as server:
        targets = parse_targets([server.url])
        place = RunDir.start(tmp_path, targets.text)
        asyncio.run(prove_exact(targets, SPEC, place, Silent()))
        asked = len(server.app.bodies)
        assert asyncio.run(prove_exact(targets, SPEC, place, Silent())).exact["oracle"]
        assert len(server.app.bodies) == asked


def test_chunk_boundaries():
    inputs = exact.cases(ExactSpec(prompts=0, chunk=2048, chunk_tokens=3), 5000)
    lengths = [len(case.prompt.ids) for case in inputs]
    assert lengths == [n for n in (1024, 2047, 2048, 2049, 4096, 8192) for _ in range(2)]
    assert inputs[0].prompt == inputs[1].prompt
    assert {case.prompt.max_tokens for case in inputs} == {3}


def test_texts_are_compared_where_ids_are_not_told():
    row = {"case": "x", "input_sha256": "h", "output_ids": None, "logprobs": None, "error": None}
    a, b = row | {"text": "abc", "output_sha256": "1"}, row | {"text": "abcd", "output_sha256": "2"}
    found = exact.compare([a], [b])
    assert found["first_difference"] == {"case": "x", "unit": "character", "position": 3, "a": None, "b": "d"}
    assert (found["identical"], found["max_logprob_diff"]) == (False, None)
    with pytest.raises(ValueError, match="inputs"):
        exact.compare([a], [b | {"input_sha256": "other"}])

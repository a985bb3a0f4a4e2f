"""The shipped model: any numeric change anywhere moves its greedy tokens, and it still solves problems."""

import json
import sys
from pathlib import Path

import pytest

from anabranch import LLM

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from training.fixtures import sha256
from training.score import pinned_tokens, solved, word_test

SMALL = Path(__file__).parents[2] / "checkpoints" / "small-k3"
pytestmark = pytest.mark.skipif(not (SMALL / "model.safetensors").is_file(), reason="no trained checkpoint here")


def test_greedy_tokens_are_the_pinned_ones():
    pins = json.loads((SMALL / "pinned.json").read_text())
    assert sha256(SMALL / "model.safetensors") == pins["weights_sha256"]
    found = pinned_tokens(SMALL)
    assert found == pins["tokens"]
    assert all(len(tokens) == 256 for tokens in found.values())


def test_it_solves_held_out_problems():
    percent, answers = solved(LLM(SMALL), word_test(SMALL, 20))
    assert percent >= 60, answers


def test_it_is_small():
    assert sum(file.stat().st_size for file in SMALL.iterdir()) <= 20_000_000

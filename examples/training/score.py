"""What a checkpoint can do, measured with the engine itself: word problems solved, held-out bits per byte."""

import json
import math
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from anabranch import LLM, SamplingParams
from anabranch.evidence.gsm8k import STOP, Test, extract, load_test

from .fixtures import sha256

_ANSWER = 160  # bytes; the longest worked answer has 118


def word_test(folder: Path, limit: int | None = None) -> Test:
    """The held-out problems of a checkpoint directory, with its worked examples in front."""
    problems = folder / "problems.jsonl"
    return load_test(problems, sha256(problems), folder / "shots.jsonl", limit=limit)


def solved(llm: LLM, test: Test) -> tuple[float, list[str]]:
    """Percent of questions whose greedy answer ends in the right number, and the answers."""
    asked = SamplingParams(max_tokens=_ANSWER, temperature=0.0, stop=STOP)
    answers = [output.outputs[0].text for output in llm.generate([test.prompt(q) for q in test.questions], asked)]
    right = [extract(text) == question.number for text, question in zip(answers, test.questions, strict=True)]
    return 100 * sum(right) / len(right), answers


def bits_per_byte(llm: LLM, folder: Path) -> Mapping[str, float]:
    """Of the documents in held_out.jsonl, by kind; the first byte of each is given."""
    lines = (folder / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    asked = SamplingParams(max_tokens=0, prompt_logprobs=0)
    nats, count = defaultdict(float), defaultdict(int)
    for row, output in zip(rows, llm.generate([row["text"] for row in rows], asked), strict=True):
        for logprob, _ in output.prompt_logprobs:
            if logprob is not None:
                nats[row["kind"]] -= logprob
                count[row["kind"]] += 1
    return {kind: nats[kind] / count[kind] / math.log(2) for kind in nats}


def tokens_per_s(llm: LLM, tokens: int = 256) -> float:
    """Greedy, one request alone, its short prompt included."""
    asked = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    llm.generate([PINNED[0]], asked)
    start = time.perf_counter()
    llm.generate([PINNED[0]], asked)
    return tokens / (time.perf_counter() - start)


PINNED = ("Return a list of ", "def main(", "Question: What is 37 plus 48?\nAnswer:", "The ")


def pinned_tokens(checkpoint: Path) -> dict[str, list[int]]:
    """256 greedy tokens after each of four prompts, fp32, deterministic: what any numeric change would move."""
    llm = LLM(checkpoint, dtype="float32", device="cpu", deterministic=True)
    asked = SamplingParams(max_tokens=256, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(list(PINNED), asked)
    return {prompt: output.outputs[0].token_ids for prompt, output in zip(PINNED, outputs, strict=True)}

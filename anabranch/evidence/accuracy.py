"""Scores of one or two arms over several server starts, and whether their answers to the same questions differ."""

import hashlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from anabranch.evidence.client import Client
from anabranch.evidence.gsm8k import RULE, STOP, Test, extract
from anabranch.evidence.load import LoadSpec, Progress, run_load
from anabranch.evidence.stats import mcnemar
from anabranch.evidence.workload import Prompt

Rows = Sequence[Mapping[str, Any]]


async def ask(
    client: Client, test: Test, concurrency: int, max_tokens: int = 512, progress: Progress | None = None
) -> list[dict[str, Any]]:
    """One row a question, in order. An answer that failed is wrong, and says why."""
    prompts = [Prompt(text=test.prompt(question), max_tokens=max_tokens) for question in test.questions]
    await client.probe(prompts[0])
    load = await run_load(client, prompts, LoadSpec(max_concurrency=concurrency), progress)
    rows = []
    for row, question in zip(load.rows, test.questions, strict=True):
        found = None if row.error else extract(row.text)
        rows.append({
            "index": row.index,
            "prompt_sha256": row.input_sha256,
            "text": row.text,
            "extracted": None if found is None else str(found),
            "expected": str(question.number),
            "correct": found == question.number,
            "output_tokens": row.output_tokens,
            "finish_reason": row.finish_reason,
            "error": row.error,
        })  # fmt: skip
    return rows


def summarise(test: Test, starts: Mapping[str, Sequence[Rows]]) -> dict[str, Any]:
    """Scores of each arm's starts; of two arms also the paired comparison, start by start and by majority."""
    first = test.prompt(test.questions[0])
    document: dict[str, Any] = {
        "task": "gsm8k",
        "source": test.source,
        "sha256": test.sha256,
        "questions": len(test.questions),
        "shots": len(test.shots),
        "prompts_sha256": test.prompts_sha256,
        "first_prompt": first,
        "first_prompt_sha256": hashlib.sha256(first.encode()).hexdigest(),
        "extraction": RULE,
        "stop": list(STOP),
        "arms": {name: _scores(rows) for name, rows in starts.items()},
    }
    if len(starts) == 2:
        a, b = starts.values()
        document["pairs"] = [_paired(x, y) for x, y in zip(a, b, strict=False)]
        document["majority"] = _paired(_majority(a), _majority(b))
    return document


def _scores(starts: Sequence[Rows]) -> dict[str, Any]:
    scores = [100 * statistics.fmean(row["correct"] for row in rows) for rows in starts]
    return {
        "scores_pct": scores,
        "mean_pct": statistics.fmean(scores),
        "median_pct": statistics.median(scores),
        "failed": sum(row["error"] is not None for rows in starts for row in rows),
        "cut_short": sum(row["finish_reason"] == "length" for rows in starts for row in rows),
    }


def _paired(a: Rows, b: Rows) -> dict[str, Any]:
    """Questions that only one arm answers rightly, McNemar's p, and how many answers are the same text."""
    only_a = sum(bool(x["correct"]) and not y["correct"] for x, y in zip(a, b, strict=True))
    only_b = sum(bool(y["correct"]) and not x["correct"] for x, y in zip(a, b, strict=True))
    found = {"only_a": only_a, "only_b": only_b, "mcnemar_p": mcnemar(only_a, only_b)}
    found["difference_points"] = 100 * (only_b - only_a) / len(a)
    if all("text" in row for row in (*a, *b)):
        found["identical_texts"] = sum(x["text"] == y["text"] for x, y in zip(a, b, strict=True))
    return found


def _majority(starts: Sequence[Rows]) -> list[dict[str, Any]]:
    """Right where more than half of the starts are."""
    return [
        {"correct": 2 * sum(bool(row["correct"]) for row in rows) > len(rows)} for rows in zip(*starts, strict=True)
    ]

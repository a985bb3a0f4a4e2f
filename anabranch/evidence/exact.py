"""Fixed inputs, greedy answers: are two arms the same token by token, and can that be asked at all?"""

import asyncio
import hashlib
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anabranch.evidence.client import Client
from anabranch.evidence.load import Progress
from anabranch.evidence.record import RequestRow
from anabranch.evidence.spec import ExactSpec
from anabranch.evidence.workload import Prompt, random_ids

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Case:
    """One input; those of a group "concurrent" are sent together."""

    name: str
    prompt: Prompt

    @property
    def together(self) -> bool:
        return self.name.startswith("concurrent")


def cases(spec: ExactSpec, vocab_size: int) -> list[Case]:
    """The inputs of a spec, the same for the same spec and vocabulary."""
    rng = random.Random(spec.seed)

    def prompt(length: int, tokens: int) -> Prompt:
        return Prompt(ids=random_ids(rng, length, vocab_size), max_tokens=tokens)

    found = [Case(f"prompt-{i}", prompt(spec.input_len, spec.tokens)) for i in range(spec.prompts)]
    if (c := spec.chunk) is not None:
        for length in sorted({1024, c - 1, c, c + 1, 2 * c, 4 * c}):
            again = prompt(length, spec.chunk_tokens)
            found += [Case(f"chunk-{length}-{i}", again) for i in (1, 2)]
    return found + [Case(f"concurrent-{i}", prompt(spec.input_len, spec.tokens)) for i in range(spec.concurrent)]


async def ask(client: Client, inputs: Sequence[Case], progress: Progress | None = None) -> list[dict[str, Any]]:
    """Answers, one row a case: first those that are asked alone, then all others at once."""
    alone, rows = [case for case in inputs if not case.together], []
    for done, case in enumerate(alone, 1):
        rows.append(_row(case, await client.stream(case.prompt, done, time.perf_counter())))
        if progress is not None:
            progress(done, len(inputs))
    together = [case for case in inputs if case.together]
    zero = time.perf_counter()
    answers = await asyncio.gather(*(client.stream(case.prompt, i, zero) for i, case in enumerate(together)))
    rows += [_row(case, answer) for case, answer in zip(together, answers, strict=True)]
    if progress is not None:
        progress(len(inputs), len(inputs))
    return rows


def _row(case: Case, answer: RequestRow) -> dict[str, Any]:
    ids = answer.token_ids
    output = answer.text if ids is None else ",".join(map(str, ids))
    return {
        "case": case.name,
        "input_sha256": answer.input_sha256,
        "input_tokens": answer.input_tokens,
        "output_ids": ids,
        "output_sha256": hashlib.sha256(output.encode()).hexdigest(),
        "output_tokens": answer.output_tokens,
        "logprobs": answer.logprobs,
        "text": answer.text,
        "error": answer.error,
    }


def compare(a: Rows, b: Rows) -> dict[str, Any]:
    """How two sets of answers to the same inputs differ; `first_difference` is the first case that does, and where.

    Raises:
        ValueError: the inputs are not the same.
    """
    if [(row["case"], row["input_sha256"]) for row in a] != [(row["case"], row["input_sha256"]) for row in b]:
        raise ValueError("the fixed inputs of the two runs differ; they were made from different specs")
    found: dict[str, Any] = {"inputs": len(a), "identical_outputs": 0, "tokens": 0, "identical_tokens": 0}
    found |= {"logprobs": 0, "identical_logprobs": 0, "max_logprob_diff": None, "failed": 0, "first_difference": None}
    for x, y in zip(a, b, strict=True):
        if x["error"] or y["error"]:
            found["failed"] += 1
            continue
        same = x["output_sha256"] == y["output_sha256"]
        found["identical_outputs"] += same
        _count_tokens(found, x, y)
        if not same and found["first_difference"] is None:
            found["first_difference"] = _first_difference(x, y)
    found["identical"] = not found["failed"] and found["identical_outputs"] == found["inputs"]
    found["identical"] &= found["identical_logprobs"] == found["logprobs"]
    return found


def verdict(control: Sequence[Mapping[str, Any]], pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What A/A comparisons allow A/B comparisons to say.

    Without a control, or with one that diverges, a difference between the arms proves nothing: no oracle.
    """
    oracle = bool(control) and all(each["identical"] for each in control)
    if not control:
        says = "no oracle: A was not compared with itself"
    elif not oracle:
        says = "no oracle: A/A itself diverges in this mode, so that A/B cannot show equality or difference"
    elif not pairs:
        says = "A/A identical; no B was asked"
    else:
        says = "identical" if all(each["identical"] for each in pairs) else "different"
    return {"oracle": oracle, "verdict": says, "control": list(control), "pairs": list(pairs)}


def _count_tokens(found: dict[str, Any], x: Mapping[str, Any], y: Mapping[str, Any]) -> None:
    if x["output_ids"] is not None and y["output_ids"] is not None:
        found["tokens"] += max(len(x["output_ids"]), len(y["output_ids"]))
        found["identical_tokens"] += sum(p == q for p, q in zip(x["output_ids"], y["output_ids"], strict=False))
    pairs = list(zip(x["logprobs"] or (), y["logprobs"] or (), strict=False))
    differences = [abs(p - q) for p, q in pairs if p is not None and q is not None]
    found["logprobs"] += len(differences)
    found["identical_logprobs"] += sum(difference == 0 for difference in differences)
    if differences:
        found["max_logprob_diff"] = max(found["max_logprob_diff"] or 0.0, *differences)


def _first_difference(x: Mapping[str, Any], y: Mapping[str, Any]) -> dict[str, Any]:
    by_id = x["output_ids"] is not None and y["output_ids"] is not None
    key = "output_ids" if by_id else "text"
    a: Sequence[Any] = x[key]
    b: Sequence[Any] = y[key]
    at = next((i for i, (p, q) in enumerate(zip(a, b, strict=False)) if p != q), min(len(a), len(b)))
    unit = "token" if by_id else "character"
    return {"case": x["case"], "unit": unit, "position": at, "a": _at(a, at), "b": _at(b, at)}


def _at(sequence: Sequence[Any], position: int) -> Any:
    """None behind the end."""
    return sequence[position] if position < len(sequence) else None

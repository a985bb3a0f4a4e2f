"""The files that measure the small model: `python -m training.fixtures DIR` from examples/ (the same bytes each time).

`problems.jsonl`: held-out word problems in the form of GSM8K's test.jsonl; `shots.jsonl`: the worked examples in front
of each; `held_out.jsonl`: documents of both kinds for bits per byte.
"""

import argparse
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from .problems import SHOTS, documents, problem_set
from .text import texts

PROBLEMS, DOCUMENTS = 200, 32
_LEAST, _MOST = 400, 1500  # bytes of a document


def write(out: Path) -> None:
    """Write the three files into `out` (made if needed)."""
    out.mkdir(parents=True, exist_ok=True)
    problems = [{"question": p.question, "answer": p.answer} for p in problem_set(2026, PROBLEMS)]
    shots = {p.template: p for p in problem_set(7, 60, held_out=False)}
    longest = sorted(shots.values(), key=lambda p: (-p.answer.count("\n"), p.template))[:SHOTS]
    _write(out / "problems.jsonl", problems)
    _write(out / "shots.jsonl", [{"question": p.question, "answer": p.answer} for p in longest])
    kinds = {"problems": list(documents(41, 60_000, held_out=True)), "text": list(texts(held_out=True))}
    rows = []
    for kind, found in kinds.items():
        long = [text[:_MOST] for text in found if len(text) >= _LEAST and text.isascii()]
        step = max(1, len(long) // DOCUMENTS)
        rows += [{"kind": kind, "text": text} for text in long[::step][:DOCUMENTS]]
    _write(out / "held_out.jsonl", rows)


def sha256(file: Path) -> str:
    """Of a file's bytes."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _write(file: Path, rows: Iterable[Mapping[str, str]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    write(out)
    for file in sorted(out.glob("*.jsonl")):
        print(file, sha256(file))


if __name__ == "__main__":
    main()

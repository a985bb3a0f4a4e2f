"""`anabranch eval`: scores of served models, with the prompt and the extraction rule in the result."""

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from anabranch.cli.verify_exact import ApiKey, ModelName, Out, Targets

app = typer.Typer(help="Score served models on a task.", no_args_is_help=True)


@app.callback()
def _verbs() -> None:
    """Score served models on a task."""


@app.command()
def gsm8k(
    targets: Targets,
    data: Annotated[Path | None, typer.Option(help="GSM8K's test.jsonl; default: a few questions of our own.")] = None,
    sha256: Annotated[str | None, typer.Option(help="Of another data file; default: that of GSM8K's.")] = None,
    shots: Annotated[Path | None, typer.Option(help="GSM8K's train.jsonl; default: five examples of our own.")] = None,
    num_shots: Annotated[int, typer.Option(help="Worked examples in front of each question.")] = 5,
    limit: Annotated[int | None, typer.Option(help="Only the first questions.")] = None,
    starts: Annotated[int, typer.Option(help="Independent server starts an arm; a URL is asked as often.")] = 1,
    concurrency: Annotated[int, typer.Option(help="Questions at a time.")] = 16,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 512,
    model: ModelName = None,
    api_key: ApiKey = None,
    out: Out = None,
) -> None:
    """GSM8K by plain completion, greedy; two arms are compared question by question (McNemar)."""
    from anabranch.cli.watch import Watch
    from anabranch.evidence.gsm8k import load_test
    from anabranch.evidence.prove import prove_accuracy
    from anabranch.evidence.rundir import RunDir
    from anabranch.evidence.targets import parse_targets

    for name, value in (("starts", starts), ("concurrency", concurrency), ("max-tokens", max_tokens)):
        if value < 1:
            raise ValueError(f"{name}={value}: need at least 1")
    test = load_test(data, sha256, shots, num_shots, limit)
    wanted = parse_targets(targets, {"model": model, "api_key": api_key})
    run_dir = RunDir.start(out or Path("runs") / f"gsm8k-{time.strftime('%Y%m%d-%H%M%S')}", wanted.text)
    options = {"starts": starts, "concurrency": concurrency, "max_tokens": max_tokens}
    with Watch() as watch:
        found = asyncio.run(prove_accuracy(wanted, test, run_dir, watch, **options)).accuracy
    _report(found)
    typer.echo(f"rows in {run_dir.path}\n{json.dumps(found)}")


def _report(found: dict[str, Any]) -> None:
    typer.echo(f"{found['source']}, {found['questions']} questions, {found['shots']} shots, {found['extraction']}")
    for name, arm in found["arms"].items():
        scores = ", ".join(f"{score:.3f}" for score in arm["scores_pct"])
        more = f"{arm['failed']} failed, {arm['cut_short']} cut short"
        typer.echo(f"{name}: {scores} %, mean {arm['mean_pct']:.3f}, median {arm['median_pct']:.3f}; {more}")
    for pair in found.get("pairs", []):
        typer.echo(
            f"pair: {pair['identical_texts']} texts identical, only A right {pair['only_a']}, only B right "
            f"{pair['only_b']}, McNemar p {pair['mcnemar_p']:.3f}"
        )

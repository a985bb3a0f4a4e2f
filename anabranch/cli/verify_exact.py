"""`anabranch verify exact`: do two servers give the same tokens, and is one of them even the same as itself?"""

import asyncio
import time
from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[Path | None, typer.Option("--out", "-o", help="Run directory; an unfinished one goes on.")]
Targets = Annotated[list[str], typer.Argument(help="URL of A, URL of B; or a spec file of `bench ab`.")]
ModelName = Annotated[str | None, typer.Option("--model", help="Default: the first of /v1/models.")]
ApiKey = Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a Bearer token.")]


def exact(
    targets: Targets,
    model: ModelName = None,
    api_key: ApiKey = None,
    prompts: Annotated[int | None, typer.Option(help="Inputs asked one by one; default 32.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of each answer; default 64.")] = None,
    input_len: Annotated[int | None, typer.Option(help="Token ids of each input; default 128.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Prefill chunk C: also 1024, C-1, C, C+1, 2C and 4C ids.")] = None,
    concurrent: Annotated[int | None, typer.Option(help="Further inputs, sent all at once.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Where the server does not tell it.")] = None,
    out: Out = None,
) -> None:
    """Compare token ids and log probabilities of fixed inputs, A with A first. Status 1 unless all are identical."""
    from dataclasses import replace

    from anabranch.cli.watch import Watch
    from anabranch.evidence.prove import prove_exact
    from anabranch.evidence.rundir import RunDir
    from anabranch.evidence.targets import parse_targets

    wanted = parse_targets(targets, {"model": model, "api_key": api_key})
    given = {"prompts": prompts, "tokens": tokens, "input_len": input_len, "chunk": chunk, "concurrent": concurrent}
    spec = replace(wanted.exact, **{name: value for name, value in given.items() if value is not None})
    run_dir = RunDir.start(out or Path("runs") / f"exact-{time.strftime('%Y%m%d-%H%M%S')}", wanted.text)
    with Watch() as watch:
        summary = asyncio.run(prove_exact(replace(wanted, size=vocab_size), spec, run_dir, watch))
    found = summary.exact
    for pair in [*found["control"], *found["pairs"]]:
        typer.echo(
            f"{' against '.join(pair['runs'])}: {pair['identical_outputs']} of {pair['inputs']} outputs, "
            f"{pair['identical_tokens']} of {pair['tokens']} token ids and {pair['identical_logprobs']} of "
            f"{pair['logprobs']} logprobs identical, largest difference {pair['max_logprob_diff']}"
        )
        if pair["first_difference"]:
            typer.echo(f"  first difference: {pair['first_difference']}")
    typer.echo(f"{found['verdict']}\nrows in {run_dir.path}")
    if found["verdict"] not in ("identical", "A/A identical; no B was asked"):
        raise typer.Exit(1)

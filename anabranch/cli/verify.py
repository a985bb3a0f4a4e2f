"""`anabranch verify`: proofs that run on the user's own model and machine."""

from typing import Annotated

import typer

from anabranch.cli import options

app = typer.Typer(help="Prove on this machine that a path gives the same tokens.", no_args_is_help=True)


@app.callback()
def _verbs() -> None:
    """Prove on this machine that a path gives the same tokens."""


@app.command()
def graphs(
    model: options.Model,
    sizes: Annotated[str | None, typer.Option(help="Graph sizes; default: the ladder up to --max-seqs.")] = None,
    max_seqs: Annotated[int, typer.Option(help="Largest batch.")] = 16,
    tokens: Annotated[int, typer.Option(help="Tokens to generate at each size.")] = 16,
    load_format: options.LoadFormat = "auto",
    max_len: options.MaxLen = 1024,
) -> None:
    """Replay every captured decode size and compare tokens and log probabilities with eager steps, bit for bit."""
    from anabranch import LLM
    from anabranch.engine.verify import verify_graphs

    llm = LLM(
        model,
        deterministic=True,
        load_format=load_format,
        max_seqs=max_seqs,
        max_len=max_len,
        prefix_cache=False,
        graph_sizes=options.parse_sizes(sizes),
    )
    wrong = 0
    for result in verify_graphs(llm, tokens):
        typer.echo(f"size {result.size:4d}: {result.replays} replays, {result.tokens} tokens, {result.verdict}")
        wrong += not result.equal
    if wrong:
        raise typer.Exit(1)

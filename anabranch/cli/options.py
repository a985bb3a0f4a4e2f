"""Options that several verbs share, so that they read and default alike."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer


def _directory(path: Path) -> Path:
    if not path.is_dir():
        raise ValueError(f"{path}: {'not a' if path.exists() else 'no such'} directory; need a checkpoint directory")
    return path


Model = Annotated[Path, typer.Argument(help="Checkpoint directory in Hugging Face layout.", callback=_directory)]
Fusion = Annotated[
    list[str] | None,
    typer.Option(
        "--fusion",
        help="kda=auto|separate|split|whole|overlap|fused|deferred|single, mla=auto|separate|merged|overlap|single, "
        "or table=FILE (measured times for auto). Repeatable.",
    ),
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
LoadFormat = Annotated[str, typer.Option(help="auto, safetensors, or dummy (seeded random weights).")]
MlaNormEps = Annotated[
    float | None, typer.Option(help="Eps of the MLA latent norms; default 1e-6 (SGLang and vLLM: 1e-5).")
]
Lora = Annotated[
    Path | None,
    typer.Option(help="Directory of a PEFT LoRA adapter on attention projections, applied to every answer."),
]
Tp = Annotated[int, typer.Option(help="Ranks of one pipeline stage, each with a GPU of its own.")]
DpAttention = Annotated[int, typer.Option(help="Attention replicas that share the tp ranks.")]
Ep = Annotated[int, typer.Option(help="Groups of ranks that each hold whole experts.")]
Pp = Annotated[int, typer.Option(help="Pipeline stages.")]
RankTimeout = Annotated[float, typer.Option(help="Seconds that one step may take before the job is ended.")]
ExpertLoad = Annotated[bool, typer.Option("--expert-load", help="Count the tokens that each expert is given.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus sampling.")]
TopK = Annotated[int, typer.Option(help="0 keeps all.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling reproducible.")]
MaxLen = Annotated[int, typer.Option(help="Longest prompt plus answer, in tokens.")]
Op = Annotated[
    list[str] | None, typer.Option("--op", help="NAME=IMPLEMENTATION, e.g. mla_decode=reference. Repeatable.")
]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Batch-invariant operations: bits depend on the request alone.")
]


@contextmanager
def one_line_failures() -> Iterator[None]:
    """An engine or a rank that has failed is told in one line, with status 1."""
    from anabranch.engine.messages import EngineFailed, RankFailed

    try:
        yield
    except EngineFailed as failure:
        typer.echo(f"error: {failure}", err=True)
        if isinstance(failure, RankFailed):
            os._exit(1)  # at an ordinary end a GPU library may wait for the rank that has gone
        raise typer.Exit(1) from None


def parse_ops(items: list[str]) -> dict[str, str]:
    """From repeated NAME=IMPLEMENTATION options."""
    wishes = {}
    for item in items:
        name, _, implementation = item.partition("=")
        if not implementation:
            raise ValueError(f"op option {item!r} is not NAME=IMPLEMENTATION")
        wishes[name] = implementation
    return wishes


def parse_sizes(text: str | None) -> list[int] | None:
    """From "1,8,32"."""
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise ValueError(f"graph sizes {text!r}: need positive numbers with commas between them")
    return [int(part) for part in parts]

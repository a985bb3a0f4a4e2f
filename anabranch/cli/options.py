"""Options that several verbs share, so that they read and default alike."""

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
        help="kda=auto|separate|split|whole|overlap|single, mla=auto|separate|merged|overlap|single, or table=FILE "
        "(measured times for auto). Repeatable.",
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

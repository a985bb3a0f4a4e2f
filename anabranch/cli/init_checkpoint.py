"""`anabranch init-checkpoint`: a tiny random checkpoint to try everything on."""

from pathlib import Path
from typing import Annotated

import typer


def init_checkpoint(
    architecture: Annotated[str, typer.Argument(help="kl (Kimi-Linear) or k3 (Kimi-K3 with MXFP4 experts).")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Directory; default ./tiny-kl or ./tiny-k3.")] = None,
    seed: Annotated[int, typer.Option(help="Of the random weights.")] = 0,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    shards: Annotated[int, typer.Option(help="Number of weight files.")] = 1,
    fp8: Annotated[bool, typer.Option("--fp8", help="Attention projections in block-FP8.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write into a directory that is not empty.")] = False,
) -> None:
    """Write a tiny model in the released format: config, tokenizer and seeded random weights."""
    from anabranch.models import tiny

    target = out or Path(f"tiny-{architecture}")
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target}: is a file; need a directory")
    if not force and target.is_dir() and any(target.iterdir()):
        raise ValueError(f"{target}: directory is not empty; --force writes into it all the same")
    tiny.init_checkpoint(architecture, target, seed=seed, dtype=dtype, shards=shards, fp8=fp8)
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    typer.echo(f"wrote {target} ({size / 1e6:.1f} MB of weights)")

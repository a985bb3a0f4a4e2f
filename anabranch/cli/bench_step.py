"""`anabranch bench decode-step | prefill`: a whole model with dummy weights, in process: steps, prompts, paths."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli import options
from anabranch.cli.bench import Config, Eager, numbers

if TYPE_CHECKING:
    from anabranch.engine.llm import LLM

    Told = tuple[str, Iterable[dict[str, Any]]]
    Run = Callable[[LLM], Iterator[Told]]

Append = Annotated[Path | None, typer.Option(help="Result rows go to the end of this JSONL file, too.")]
Repeats = Annotated[int, typer.Option(help="Waves, or prompts, of each case.")]
Profile = Annotated[bool, typer.Option("--profile", help="Also where the time goes, kernel by kernel.")]
StateDtype = Annotated[str, typer.Option(help="Recurrent state: float32 or bfloat16.")]
Chunk = Annotated[int, typer.Option(help="Prompt tokens computed in one step.")]
MaxLen = Annotated[
    int | None, typer.Option(help="Longest prompt plus answer that cache and graphs are made for; default 36864.")
]
Memory = Annotated[float, typer.Option(help="Share of the device for model and cache.")]


def decode_step(
    config: Config,
    batches: Annotated[str, typer.Option(help="Requests that decode together.")] = "1,8,32,64,128",
    tokens_in: Annotated[int, typer.Option(help="Random tokens of each prompt.")] = 1024,
    tokens_out: Annotated[int, typer.Option(help="Tokens of each answer.")] = 128,
    repeats: Repeats = 2,
    paths: Annotated[
        str | None, typer.Option(help="A,B: two projection paths in turn instead, e.g. separate,fused; also KDA+MLA.")
    ] = None,
    profile: Profile = False,
    append: Append = None,
    prefill_chunk: Chunk = 16384,
    max_len: MaxLen = None,
    memory_fraction: Memory = 0.94,
    state_dtype: StateDtype = "float32",
    eager: Eager = False,
    fusion: options.Fusion = None,
    op: options.Op = None,
    deterministic: options.Deterministic = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Time per output token at each batch size, the experts that were touched, the floor, launches, GPU busy."""
    from anabranch.measure.decode_step import tail

    sizes = numbers("batches", batches)
    made = _options(config, sizes, device, dtype, eager, deterministic, fusion, op)
    made["max_len"] = _room(max_len, tokens_in + tokens_out + tail(max(sizes), tokens_in, prefill_chunk))
    made |= {"state_dtype": state_dtype, "prefill_chunk": prefill_chunk, "memory_fraction": memory_fraction}
    lengths: dict[str, Any] = {"tokens_in": tokens_in, "tokens_out": tokens_out, "repeats": repeats}

    def run(llm: "LLM") -> "Iterator[Told]":
        from random import Random

        from anabranch.measure.decode_step import bench_decode, lines
        from anabranch.measure.step_paths import StepPaths

        if paths is not None:
            arms = StepPaths(llm, [name.strip() for name in paths.split(",")])
            for batch in sizes:
                compared = arms.bench(batch, **lengths, rng=Random(0))
                yield compared.line(), compared.rows()
            return
        for batch in sizes:
            result = bench_decode(llm, batch, **lengths, rng=Random(0))
            recorded = [result.profile_row()] if profile and result.launches else []
            yield "\n".join(lines(result, profile)), [result.row(), *recorded]

    _report(made, append, run)


def prefill(
    config: Config,
    tokens: Annotated[str, typer.Option(help="Prompt lengths.")] = "1024,8192,32768",
    repeats: Repeats = 2,
    profile: Profile = False,
    append: Append = None,
    prefill_chunk: Chunk = 16384,
    max_len: MaxLen = None,
    memory_fraction: Memory = 0.94,
    state_dtype: StateDtype = "float32",
    fusion: options.Fusion = None,
    op: options.Op = None,
    deterministic: options.Deterministic = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Time to the first token of one prompt at each length, beside the floor of its arithmetic."""
    lengths = numbers("tokens", tokens)
    made = _options(config, [1], device, dtype, False, deterministic, fusion, op)
    made["max_len"] = _room(max_len, max(lengths) + 1)
    made |= {"state_dtype": state_dtype, "prefill_chunk": prefill_chunk, "memory_fraction": memory_fraction}

    def run(llm: "LLM") -> "Iterator[Told]":
        from random import Random

        from anabranch.measure.prefill import bench_prefill

        for length in lengths:
            result = bench_prefill(llm, length, repeats=repeats, profile=profile, rng=Random(0))
            recorded = [result.profile_row()] if result.launches else []
            yield "\n".join(result.lines()), [result.row(), *recorded]

    _report(made, append, run)


VERBS = (decode_step, prefill)


def _options(
    config: Path,
    sizes: list[int],
    device: str,
    dtype: str,
    eager: bool,
    deterministic: bool,
    fusion: list[str] | None,
    op: list[str] | None,
) -> dict[str, Any]:
    """Fields of `ModelOptions`."""
    from anabranch import FusionConfig

    fields = {"config": config, "sizes": sizes, "device": device, "dtype": dtype, "eager": eager}
    wishes = {"fusion": FusionConfig.parse(fusion or []), "ops": options.parse_ops(op or [])}
    return fields | {"deterministic": deterministic} | wishes


def _room(wished: int | None, needed: int) -> int:
    from anabranch.measure.whole_model import MAX_LEN

    return max(MAX_LEN, needed) if wished is None else wished


def _report(made: dict[str, Any], append: Path | None, run: "Run") -> None:
    """Lines for people as they come, then one JSON document on the last line."""
    import torch

    from anabranch.measure.rows import append_row, provenance
    from anabranch.measure.whole_model import ModelOptions

    wished: ModelOptions = ModelOptions(**made)
    llm, rows = wished.open(), []
    where = provenance(llm.engine.runner.device, ["anabranch", *sys.argv[1:]]) | {"arm": wished.arm(llm)}
    typer.echo(llm.memory)
    with torch.inference_mode():
        for text, found in run(llm):
            typer.echo(text)
            for row in found:
                rows.append(row)
                if append is not None:
                    append_row(append, where | row)
    typer.echo(json.dumps(where | {"rows": rows}))

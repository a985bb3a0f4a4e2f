"""`anabranch bench pack | conv | kda-prefill | kda-decode | gate | fp8-linear`: one operation beside its peers."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anabranch.cli.bench import numbers

if TYPE_CHECKING:
    import torch

    from anabranch.measure.arms import ArmTimes

    Run = Callable[[torch.device], Iterator[ArmTimes]]

Append = Annotated[Path | None, typer.Option(help="Result rows go to the end of this JSONL file, too.")]
Device = Annotated[str, typer.Option(help="cuda or cuda:N.")]


def pack(
    cases: Annotated[str, typer.Option(help="HEADSxTOKENS.")] = "96x16384,12x16384,96x4096,12x4096,96x1024",
    device: Device = "cuda",
    append: Append = None,
) -> None:
    """q, k, v and beta of a prompt made dense: one launch against four copies."""
    shapes = shapes_of("cases", cases, 2)

    def run(on: "torch.device") -> "Iterator[ArmTimes]":
        from anabranch.measure.pack import bench_pack

        return bench_pack(on, shapes)

    _report("pack", device, append, run)


def conv(
    cases: Annotated[
        str, typer.Option(help="HEADSxTOKENSxSEGMENTS.")
    ] = "96x16384x1,12x16384x1,32x8192x1,12x4096x16,96x1024x1",
    tiles: Annotated[str, typer.Option(help="Tiles of the kernel, like S8R16W4, as arms of the grouped layout.")] = "",
    device: Device = "cuda",
    append: Append = None,
) -> None:
    """From raw projection rows to what a prefill kernel reads: each layout against the chain of operations."""
    shapes = shapes_of("cases", cases, 3)

    def run(on: "torch.device") -> "Iterator[ArmTimes]":
        from anabranch.measure.conv import bench_conv

        return bench_conv(on, shapes, _names(tiles))

    _report("conv", device, append, run)


def kda_prefill(
    cases: Annotated[
        str, typer.Option(help="HEADSxTOKENSxSEGMENTS.")
    ] = "96x16384x1,32x16384x1,32x8192x1,32x1024x1,12x16384x1,12x16384x16,12x4096x1",
    gate: Annotated[str, typer.Option(help="bounded or softplus.")] = "bounded",
    only: Annotated[str, typer.Option(help="Of cuda, chunked, fla, flash; empty is all that may run here.")] = "",
    parts: Annotated[bool, typer.Option("--parts", help="Both kernels of ours alone, too.")] = False,
    chains: Annotated[str, typer.Option(help="Launches of the Triton chain, like R64W4S2, as arms.")] = "",
    device: Device = "cuda",
    append: Append = None,
) -> None:
    """The chunked KDA prefill from convolved rows to o: every backend; fla-core tunes itself a minute a head count."""
    shapes = shapes_of("cases", cases, 3)

    def run(on: "torch.device") -> "Iterator[ArmTimes]":
        from anabranch.measure.kda_prefill import bench_kda_prefill

        return bench_kda_prefill(on, shapes, gate=gate, only=_names(only), parts=parts, chains=_names(chains))

    _report("kda-prefill", device, append, run)


def kda_decode(
    only: Annotated[
        str, typer.Option(help="Sections; chain is with the projection in front.")
    ] = "step,f-b,tokens,bf16,chain",
    cases: Annotated[str, typer.Option(help="HEADSxBATCH instead of each section's own.")] = "",
    variants: Annotated[bool, typer.Option("--variants", help="Every compiled variant of step and bf16.")] = False,
    device: Device = "cuda",
    append: Append = None,
) -> None:
    """The fused KDA decode step, its forms, and prologue and step together."""
    names = [name.strip() for name in only.split(",")]
    pairs = shapes_of("cases", cases, 2) if cases else None

    def run(on: "torch.device") -> "Iterator[ArmTimes]":
        from anabranch.measure.kda_sections import bench_sections

        return bench_sections(on, names, pairs, variants=variants)

    _report("kda-decode", device, append, run, ("kda_step", "skinny_gemm"))


def gate(
    cases: Annotated[
        str, typer.Option(help="HEADSxTOKENS.")
    ] = "12x1,12x8,12x16,12x32,12x64,12x128,96x1,96x8,96x32,96x128",
    device: Device = "cuda",
    append: Append = None,
) -> None:
    """The MLA output gate, x * sigmoid(g) with g a slice of a wider row: one launch against the torch pair."""
    shapes = shapes_of("cases", cases, 2)

    def run(on: "torch.device") -> "Iterator[ArmTimes]":
        from anabranch.measure.output_gate import bench_gate

        return bench_gate(on, shapes)

    _report("gate", device, append, run)


def fp8_linear(
    shapes: Annotated[str, typer.Option(help="Names of shapes.")] = "k3 kda tp8,kl kda tp1",
    rows: Annotated[str, typer.Option(help="Numbers of tokens M.")] = "1,8,32,128,512",
    tiles: Annotated[str, typer.Option(help="Tiles of Triton, like T16R64K128W4S5P, or layouts, as arms.")] = "",
    device: Device = "cuda",
    append: Append = None,
) -> None:
    """Products with a block-FP8 weight against the same weight in bf16."""
    names, tokens = [name.strip() for name in shapes.split(",")], numbers("rows", rows)
    wanted = [tile.strip() for tile in tiles.split(",") if tile.strip()]

    def run(on: "torch.device") -> "Iterator[ArmTimes]":
        from anabranch.measure.fp8_linear import bench_fp8_linear

        return bench_fp8_linear(on, names, tokens, wanted)

    _report("fp8-linear", device, append, run)


VERBS = (pack, conv, kda_prefill, kda_decode, gate, fp8_linear)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def shapes_of(name: str, text: str, count: int) -> list[tuple[int, ...]]:
    """From "96x16384,12x4096"; ValueError unless every part is `count` positive numbers."""
    found = [part.strip().split("x") for part in text.split(",")]
    if not all(len(part) == count and all(n.isdecimal() and int(n) for n in part) for part in found):
        needed = "x".join(["N"] * count)
        raise ValueError(f"{name}={text!r}: need {needed} of positive numbers, with commas between them")
    return [tuple(int(n) for n in part) for part in found]


def _report(verb: str, device: str, append: Path | None, run: "Run", natives: tuple[str, ...] = ()) -> None:
    """Lines for people, then one JSON document on the last line. A red gate is status 1, without a figure."""
    import torch

    from anabranch.measure.gate import GateRedError
    from anabranch.measure.rows import append_row, provenance

    on = _gpu(verb, device, natives)
    where, rows = provenance(on, ["anabranch", *sys.argv[1:]]), []
    torch.manual_seed(0)
    try:
        with torch.inference_mode(), torch.cuda.device(on):
            for result in run(on):
                typer.echo("\n".join(lines(result)))
                for row in result.rows():
                    rows.append(row)
                    if append is not None:
                        append_row(append, where | row)
                torch.cuda.empty_cache()
    except GateRedError as error:
        typer.echo(f"gate red, nothing more is timed: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(json.dumps(where | {"rows": rows}))


def _gpu(verb: str, device: str, natives: tuple[str, ...]) -> "torch.device":
    """The device; ValueError where this verb cannot run."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError(f"bench {verb} needs a CUDA GPU, this machine has none")
    from anabranch.models.load import device_of
    from anabranch.ops.registry import Implementation

    on = device_of(device)
    if on.type != "cuda":
        raise ValueError(f"device={device!r}: accepted are cuda, cuda:N")
    for folder in natives:
        verdict = Implementation(name="cuda", native=folder).verdict(None, on, False)
        if not verdict.ok:
            raise ValueError(f"bench {verb}: {folder} {verdict.reason}")
    return on


def lines(result: "ArmTimes") -> Iterator[str]:
    """A case: every arm beside its floor and the first arm; a difference inside the A/A spread is none."""
    timed, base = result.timed, next(iter(result.timed.us))
    case = ", ".join(f"{name} {value}" for name, value in result.case.items())
    yield f"{result.bench} {case}: A/A {timed.spread_pct:.1f} %, gate green ({result.equality})"
    for row in result.rows():
        us, arm, floor = row["us_median"], row["arm"], row["floor_us"]
        gain = us - timed.median(base)
        verdict = "no difference" if abs(gain) <= timed.spread_us else f"{us / timed.median(base):.2f}x {base}"
        over = f"{us / floor:6.2f}x floor" if floor else " " * 12
        yield f"  {arm:24} {us:9.2f} us {over} {row['gbs']:7.0f} GB/s  {'' if arm == base else verdict}".rstrip()

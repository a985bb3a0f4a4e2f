"""`anabranch plan`: what a config.json becomes in a parallel layout, before any weight is read."""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch import __version__
from anabranch.cli import options
from anabranch.cli.explain import measured_document, print_measured

if TYPE_CHECKING:
    from anabranch.config.fusion import FusionConfig
    from anabranch.config.model import ModelConfig
    from anabranch.fusion.describe import PrologueReport
    from anabranch.models.kimi import KimiForCausalLM
    from anabranch.parallel.layout import Layout

_UNITS = {"": 1, "B": 1} | {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
_UNITS |= {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}
_NAMES = {"kimi_linear": "Kimi-Linear", "kimi_k3": "Kimi-K3"}
_WIDTH = 100


def plan(
    path: Annotated[Path, typer.Argument(help="config.json, or the directory that holds it; nothing else is read.")],
    tp: Annotated[int, typer.Option(help="Ranks of one pipeline stage.")] = 1,
    dp_attention: Annotated[int, typer.Option(help="Attention replicas that share the tp ranks.")] = 1,
    ep: Annotated[int, typer.Option(help="Groups of ranks that each hold whole experts.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    fusion: options.Fusion = None,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")] = "auto",
    state_dtype: Annotated[str, typer.Option(help="Recurrent state: float32 or bfloat16.")] = "float32",
    rank: Annotated[int | None, typer.Option(help="Only this global rank, with its place.")] = None,
    memory: Annotated[str | None, typer.Option(help="Bytes a rank, e.g. 141GB: how many requests fit.")] = None,
    length: Annotated[
        int | None, typer.Option("--len", help="With --memory: tokens a request [default: the context].")
    ] = None,
    lora: options.Lora = None,
    explain: Annotated[bool, typer.Option("--explain", help="Also the measured times behind every choice.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of tables.")] = False,
) -> None:
    """Print projection paths, GEMM rows and bytes of a layout."""
    from anabranch.config import FusionConfig
    from anabranch.config.hf import load_model_config
    from anabranch.parallel.layout import Layout

    config = load_model_config(path)
    layout = Layout(tp=tp, dp_attention=dp_attention, ep=ep, pp=pp)
    layout.check(config)
    wish, dtype = FusionConfig.parse(fusion or []), config.dtype if dtype == "auto" else dtype
    document = {"anabranch": __version__, "config": str(path)} | plan_document(
        config,
        layout,
        wish,
        dtype=dtype,
        state_dtype=state_dtype,
        rank=rank,
        memory=None if memory is None else parse_bytes(memory),
        tokens=length,
        lora=lora,
    )
    if explain:
        document["measured"] = measured_document(config, layout, wish, dtype)
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        _print(document)


def plan_document(
    config: "ModelConfig",
    layout: "Layout",
    fusion: "FusionConfig",
    *,
    dtype: str,
    state_dtype: str,
    rank: int | None = None,
    memory: int | None = None,
    tokens: int | None = None,
    lora: Path | None = None,
) -> dict[str, Any]:
    """Everything `plan` prints, as JSON values; sizes in bytes. An adapter's own bytes are not counted.

    Raises:
        ValueError: an unknown dtype, a rank outside the layout, a refused fusion path, or a useless capacity question.
    """
    import torch

    from anabranch.engine.footprint import capacity, footprint, meta_model
    from anabranch.models.lora import read_adapter

    _accept("dtype", dtype, ("float32", "bfloat16", "float16"))
    _accept("state-dtype", state_dtype, ("float32", "bfloat16"))
    if memory is None and tokens is not None:
        raise ValueError("--len says nothing without --memory")
    tokens = config.max_context if tokens is None else tokens
    if tokens > config.max_context:
        raise ValueError(f"len={tokens} exceeds the model's context of {config.max_context}")
    place = None if rank is None else {"rank": rank} | asdict(layout.rank(rank))
    adapted = () if lora is None else read_adapter(lora, config).modules
    made_as = getattr(torch, dtype)
    stages = [meta_model(config, layout, s * layout.tp, made_as, fusion, adapted) for s in range(layout.pp)]
    footprints = [footprint(model, layout, getattr(torch, state_dtype)) for model in stages]
    fit = None if memory is None else asdict(capacity(footprints, layout, memory, tokens))
    return {
        "model": _model(config),
        "layout": asdict(layout) | {"attention_tp": layout.attn_tp, "ranks": layout.world},
        "dtype": dtype,
        "state_dtype": state_dtype,
        "prologues": [asdict(report) for report in _prologues(config, stages)],
        "place": place,
        "ranks": [_rank(config, layout, i) for i in range(layout.world) if rank in (None, i)],
        "footprints": [asdict(f) for f in footprints if rank is None or f.ranks[0] <= rank <= f.ranks[1]],
        "weight_bytes_all_ranks": layout.tp * sum(f.weight_bytes for f in footprints),
        "capacity": fit,
    }


def _accept(option: str, value: str, legal: Sequence[str]) -> None:
    if value not in legal:
        raise ValueError(f"{option}={value!r}: accepted are {', '.join(legal)}")


def parse_bytes(text: str) -> int:
    """A size such as `141GB`, `80GiB` or `1000`, in bytes.

    Raises:
        ValueError: no number, or an unknown unit.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if not found or found[2] not in _UNITS:
        raise ValueError(f"memory={text!r}: need a number and one of {', '.join(unit for unit in _UNITS if unit)}")
    return int(float(found[1]) * _UNITS[found[2]])


def _rank(config: "ModelConfig", layout: "Layout", rank: int) -> dict[str, Any]:
    """What one rank holds: heads by attention-TP, layers [first, behind) by stage, whole experts by ep."""
    from anabranch.parallel.layout import stage_layers

    place = layout.rank(rank)
    layers = stage_layers(config.layers, place.pp_size, place.pp_rank)
    experts = config.moe.experts // place.ep_size if config.moe else 0
    return {
        "rank": rank,
        "replica": place.dp_rank,
        "layers": [layers.start, layers.stop],
        "kda_heads": config.kda.heads // place.attn_tp_size,
        "mla_heads": config.mla.heads // place.attn_tp_size,
        "experts": [place.ep_rank * experts, (place.ep_rank + 1) * experts],
        "samples": place.samples,
    }


def _model(config: "ModelConfig") -> dict[str, Any]:
    return {
        "architecture": config.architecture,
        "layers": config.layers,
        "kda_layers": config.layer_count("kda"),
        "mla_layers": config.layer_count("mla"),
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "kda_heads": config.kda.heads,
        "mla_heads": config.mla.heads,
        "experts": config.moe.experts if config.moe else 0,
        "experts_per_token": config.moe.top_k if config.moe else 0,
        "expert_format": config.expert_format,
        "max_context": config.max_context,
    }


def _prologues(config: "ModelConfig", stages: "Sequence[KimiForCausalLM]") -> "Iterable[PrologueReport]":
    """One report for each layer kind that the model has, read off its first layer."""
    from anabranch.fusion.describe import describe

    layers = {int(i): layer for model in stages for i, layer in model.model.layers.items()}
    for kind in ("kda", "mla"):
        if kind in config.layer_kinds:
            first: Any = layers[config.layer_kinds.index(kind)]
            yield describe(first.self_attn.prologue, getattr(stages[0].plan, kind), config)


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console

    # a pipe gets a fixed width, so that its text can be compared
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, markup=False, highlight=False)
    model, layout = document["model"], document["layout"]
    console.print(
        f"{_NAMES[model['architecture']]}: {model['kda_layers']} KDA + {model['mla_layers']} MLA layers, "
        f"hidden {model['hidden_size']}, vocab {model['vocab_size']}, {_experts(model)}"
    )
    console.print(
        f"layout: tp {layout['tp']} = dp-attention {layout['dp_attention']} x attention-TP {layout['attention_tp']}, "
        f"ep {layout['ep']}, pp {layout['pp']}; ranks {layout['ranks']}"
    )
    console.print(f"dtype: {document['dtype']}, recurrent state {document['state_dtype']}")
    for prologue in document["prologues"]:
        kind = prologue["kind"]
        heads = f"{document['ranks'][0][kind + '_heads']} of {model[kind + '_heads']} heads on every rank"
        shown = f", {heads}" if layout["ranks"] > 1 else ""
        console.print(f"\n{kind.upper()} prologue, {model[kind + '_layers']} layers{shown}")
        console.print(*_buffer_lines(prologue), sep="\n")
        console.print(_path_table(prologue))
        console.print(f"  chosen: {prologue['chosen']} ({prologue['reason']})")
    if "measured" in document:
        print_measured(console, document["measured"])
    console.print()
    if place := document["place"]:
        groups = (f"{g} {place[g + '_rank']} of {place[g + '_size']}" for g in ("pp", "tp", "attn_tp", "ep"))
        console.print(f"rank {place['rank']}: {', '.join(groups)}")
    console.print(_byte_table(document["footprints"]))
    console.print(f"  weights of all ranks: {_binary(document['weight_bytes_all_ranks'])}")
    if fit := document["capacity"]:
        console.print(
            f"  requests of {fit['tokens']} tokens in {fit['memory']:,} B a rank: {fit['requests_per_replica']} x "
            f"{fit['replicas']} replicas = {fit['requests']}\n  (beside weights and cache, activations need memory too)"
        )


def _experts(model: dict[str, Any]) -> str:
    if not model["experts"]:
        return "no experts"
    return f"{model['experts']} {model['expert_format']} experts, {model['experts_per_token']} a token"


def _buffer_lines(prologue: dict[str, Any]) -> Iterable[str]:
    for buffer in prologue["buffers"]:
        segments = [f"{name.split('_proj')[0]} {rows}" for name, rows in buffer["segments"]]
        if buffer["pad"]:
            segments.append(f"pad {buffer['pad']}")
        coded = " block-FP8" if buffer["format"] == "block-FP8" else ""
        yield f"  buffer {buffer['rows']} rows x {buffer['depth']}{coded}: {' | '.join(segments)}"


def _path_table(prologue: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table("  path", "verdict", "rows of each GEMM", box=None, padding=(0, 2, 0, 0))
    unfused = len(prologue["paths"][0]["gemms"])
    for path in prologue["paths"]:
        count = sum(not gemm["inside"] for gemm in path["gemms"])
        launches = f"{f'{unfused} -> ' * (count != unfused)}{count} GEMM{'s' * (count > 1)}"
        detail = [", ".join(_gemm(gemm) for gemm in path["gemms"])] if count else []
        detail += [_split(g) for g in path["gemms"] if len(g["parts"]) > 1]
        table.add_row(
            f"{'*' if path['path'] in prologue['chosen'].split(' or ') else ' '} {path['path']}",
            f"ok, {launches}" if path["ok"] else "refused",
            "\n".join([*detail, path["reason"]]),
        )
    return table


def _gemm(gemm: dict[str, Any]) -> str:
    return f"{gemm['name']} {_rows(gemm)}{' beside' * gemm['side']}{' inside' * gemm['inside']}"


def _rows(gemm: dict[str, Any]) -> str:
    return f"{gemm['rows']}" if gemm["batch"] == 1 else f"{gemm['batch']} x {gemm['rows'] // gemm['batch']}"


def _split(gemm: dict[str, Any]) -> str:
    columns = " | ".join(str(part["columns"]) for part in gemm["parts"])
    return f"{gemm['name']} split {columns} ({', '.join(part['to'] for part in gemm['parts'])})"


def _byte_table(footprints: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in (
        "ranks",
        "layers",
        "weights",
        "of it pad",
        "fusion extra",
        "state B\na request",
        "latent B\na token",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for f in footprints:
        table.add_row(
            "-".join(str(rank) for rank in dict.fromkeys(f["ranks"])),
            f"{f['layers'][0]}-{f['layers'][1] - 1}",
            _binary(f["weight_bytes"]),
            f"{f['pad_bytes']:,}",
            f"{f['fusion_bytes']:,} B",
            f"{f['state_bytes_per_request']:,}",
            f"{f['latent_bytes_per_token']:,}",
        )
    return table


def _binary(size: int) -> str:
    return f"{size:,} B ({size / 2**30:,.2f} GiB)"

"""What one rank of a job is, for `/server_info`."""

import socket
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from anabranch.engine.footprint import footprint
from anabranch.engine.memory import MemoryPlan
from anabranch.engine.runner import Runner
from anabranch.fusion.describe import PrologueReport, describe
from anabranch.models.kimi import KimiForCausalLM
from anabranch.parallel.layout import Layout


def rank_facts(runner: Runner, memory: MemoryPlan) -> dict[str, Any]:
    """What a rank is: its place, device, bytes, and for each of its layer kinds the paths over its split sizes."""
    model, parallel = runner.model, runner.model.parallel
    layout = layout_of(model)
    return {
        "rank": parallel.pp_rank * parallel.tp_size + parallel.tp_rank,
        "host": socket.gethostname(),
        "device": str(runner.device),
        "place": asdict(parallel),
        "fusions": {
            report.kind: {
                "chosen": report.chosen,
                "reason": report.reason,
                "rows": [dict(buffer.segments) | {"pad": buffer.pad} for buffer in report.buffers],
            }
            for report in prologues(model)
        },
        "graph_sizes": runner.graphs.sizes if runner.graphs else [],
        "prompt_sizes": runner.prompts.sizes if runner.prompts else [],
        "footprint": asdict(footprint(model, layout, runner.cache.shape.state_dtype)),
        "memory": asdict(memory),
    }


def layout_of(model: KimiForCausalLM) -> Layout:
    """The layout that the ranks of a model form."""
    parallel = model.parallel
    return Layout(
        tp=parallel.tp_size,
        dp_attention=parallel.tp_size // parallel.attn_tp_size,
        ep=parallel.ep_size,
        pp=parallel.pp_size,
    )


def prologues(model: KimiForCausalLM) -> Iterator[PrologueReport]:
    """One report for each layer kind that this rank has, read off its first layer of the kind."""
    for kind in ("kda", "mla"):
        of_kind = (layer for i, layer in model.model.layers.items() if model.config.layer_kinds[int(i)] == kind)
        first: Any = next(of_kind, None)
        if first is not None:
            yield describe(first.self_attn.prologue, getattr(model.plan, kind), model.config)

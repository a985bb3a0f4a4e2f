"""What the server is and what it chose: /server_info for people, and the documents that routers ask for."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from anabranch import __version__
from anabranch.engine.footprint import footprint
from anabranch.fusion import counters
from anabranch.fusion.describe import PrologueReport, describe
from anabranch.parallel.layout import Layout
from anabranch.server.desk import Desk


def model_document(desk: Desk) -> dict[str, Any]:
    """Names and limits of the model."""
    path = str(desk.llm.path)
    return {
        "model_path": path,
        "tokenizer_path": path,
        "served_model_name": desk.model_name,
        "is_generation": True,
        "architecture": desk.architecture,
        "max_model_len": desk.llm.max_len,
        "vocab_size": desk.llm.model.config.vocab_size,
        "weight_version": "default",
    }


def loads_document(desk: Desk) -> dict[str, Any]:
    """How busy the engine is, under the names that routers read."""
    stats = desk.stats()
    load = {
        "dp_rank": 0,
        "num_running_reqs": stats["running"],
        "num_waiting_reqs": stats["waiting"],
        "num_total_reqs": stats["running"] + stats["waiting"],
        "token_usage": stats["pages_used"] / max(1, stats["pages_total"]),
        "state_slots_used": stats["slots_used"],
        "state_slots_total": stats["slots_total"],
        "cache_hit_rate": stats["prefix_hits"] / max(1, stats["prefix_queries"]),
    }
    return {"version": __version__, "dp_rank_count": 1, "loads": [load]}


def server_document(desk: Desk) -> dict[str, Any]:
    """Configuration, every choice with its reason, bytes and counters; nothing secret."""
    model = desk.llm.model
    layout = _layout(desk)
    state_dtype = desk.llm.engine.runner.cache.shape.state_dtype
    return model_document(desk) | {
        "version": __version__,
        "tp_size": layout.tp,
        "dp_size": 1,
        "dtype": str(model.dtype).removeprefix("torch."),
        "deterministic": model.deterministic,
        "config": asdict(model.config),
        "layout": asdict(layout) | {"attention_tp": layout.attn_tp, "ranks": layout.world},
        "fusions": [asdict(report) for report in _prologues(desk)],
        "ops": {
            name: {"implementation": implementation, "reason": reason}
            for name, (implementation, reason) in model.selection.chosen.items()
        },
        "footprint": asdict(footprint(model, layout, state_dtype)),
        "memory": asdict(desk.llm.memory),
        "counters": counters.snapshot(),
        "stats": dict(desk.stats()),
        "settings": desk.settings.public(),
    }


def _layout(desk: Desk) -> Layout:
    parallel = desk.llm.model.parallel
    return Layout(
        tp=parallel.tp_size,
        dp_attention=parallel.tp_size // parallel.attn_tp_size,
        ep=parallel.ep_size,
        pp=parallel.pp_size,
    )


def _prologues(desk: Desk) -> Iterator[PrologueReport]:
    """One report for each layer kind that this rank has, read off its first layer of the kind."""
    model = desk.llm.model
    for kind in ("kda", "mla"):
        of_kind = (layer for i, layer in model.model.layers.items() if model.config.layer_kinds[int(i)] == kind)
        first: Any = next(of_kind, None)
        if first is not None:
            yield describe(first.self_attn.prologue, getattr(model.plan, kind), model.config)

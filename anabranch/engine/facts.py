"""What an engine tells about itself: its constant facts once, and its counters after every step."""

from collections import Counter
from dataclasses import asdict
from typing import Any

from anabranch.engine.engine import Engine
from anabranch.engine.footprint import footprint
from anabranch.engine.llm import LLM
from anabranch.engine.messages import Facts
from anabranch.engine.rank_facts import layout_of, prologues, rank_facts
from anabranch.fusion import counters
from anabranch.fusion.product import Adapter


def facts_of(llm: LLM) -> Facts:
    """Facts of a loaded model; call it where the engine runs."""
    model = llm.model
    return Facts(
        path=llm.path,
        architecture=model.config.architecture,
        limits=llm.engine.limits,
        vocab_size=model.config.vocab_size,
        fusions={c.kind: (" or ".join(c.paths), c.reason) for c in (model.plan.kda, model.plan.mla)},
        memory=str(llm.memory),
        document=_document(llm),
        stats=stats_of(llm.engine),
    )


def stats_of(engine: Engine) -> dict[str, Any]:
    """Counts and levels now."""
    each = [_levels(one) for one in engine.replicas]
    stats: dict[str, Any] = {name: sum(one[name] for one in each) for name in each[0]}
    finished = sum((one.finished for one in engine.replicas), Counter())
    return stats | {
        "finished": dict(finished),
        "eager_steps": dict(engine.runner.eager_steps),
        "graph_replays": dict(engine.runner.graph_replays),
        "prompt_replays": dict(engine.runner.prompt_replays),
        "counters": counters.snapshot(),
        "replicas": each,
    }


def _levels(engine: Engine) -> dict[str, int]:
    """The numbers of one attention replica."""
    scheduler, cache = engine.scheduler, engine.scheduler.cache
    return {
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "slots_used": cache.slots - len(scheduler.slots),
        "slots_total": cache.slots,
        "pages_used": cache.pages - len(scheduler.pages),
        "pages_total": cache.pages,
        "prompt_tokens": engine.prompt_tokens,
        "generation_tokens": engine.generation_tokens,
        "prefix_queries": scheduler.prefix_queries,
        "prefix_hits": scheduler.prefix_hits,
        "preemptions": scheduler.preemptions,
        "nonfinite": engine.nonfinite,
    }


def _document(llm: LLM) -> dict[str, Any]:
    model = llm.model
    layout = layout_of(model)
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "deterministic": model.deterministic,
        "config": asdict(model.config),
        "layout": asdict(layout) | {"attention_tp": layout.attn_tp, "ranks": layout.world},
        "fusions": [asdict(report) for report in prologues(model)],
        "ranks": [rank_facts(llm.engine.runner, llm.memory), *(llm.fleet.facts.values() if llm.fleet else ())],
        "ops": {
            name: {"implementation": implementation, "reason": reason}
            for name, (implementation, reason) in model.selection.chosen.items()
        },
        "adapter": _adapter(llm),
        "counts_experts": bool(llm.model.expert_load()),
        "footprint": asdict(footprint(model, layout, llm.engine.runner.cache.shape.state_dtype)),
        "memory": asdict(llm.memory),
    }


def load_document(llm: LLM) -> dict[str, Any]:
    """Tokens that every expert was given, and how evenly that loads the ranks: the largest share over the mean."""
    layers, parts = llm.expert_load(), llm.model.parallel.ep_size
    shares = [0] * parts
    for counts in layers.values():
        each = len(counts) // parts
        shares = [share + sum(counts[i * each : (i + 1) * each]) for i, share in enumerate(shares)]
    return {
        "tokens": {str(layer): counts for layer, counts in layers.items()},
        "by_ep_rank": shares,
        "imbalance": max(shares) * parts / sum(shares) if sum(shares) else None,
    }


def _adapter(llm: LLM) -> dict[str, Any] | None:
    """The LoRA adapter that the layers of this rank carry, with how many projections of each name."""
    found = {name: m for name, m in llm.model.named_modules() if isinstance(m, Adapter)}
    if not found:
        return None
    # a merged buffer keeps its adapters by projection, a layer of its own is named like it
    leaves = Counter(name.removesuffix(".adapter").rpartition(".")[2] for name in found)
    one: Any = next(iter(found.values()))
    return {"path": str(llm.lora), "rank": one.a.shape[0], "scale": one.scale, "projections": dict(leaves)}

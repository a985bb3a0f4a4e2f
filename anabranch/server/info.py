"""What the server is and what it chose: /server_info for people, and the documents that routers ask for."""

from typing import Any

from anabranch import __version__
from anabranch.server.desk import Desk


def model_document(desk: Desk) -> dict[str, Any]:
    """Names and limits of the model."""
    return {
        "model_path": desk.weights.path,
        "tokenizer_path": str(desk.facts.path),
        "served_model_name": desk.model_name,
        "is_generation": True,
        "architecture": desk.architecture,
        "max_model_len": desk.max_len,
        "vocab_size": desk.facts.vocab_size,
        "weight_version": desk.weights.version,
    }


def loads_document(desk: Desk) -> dict[str, Any]:
    """How busy each attention replica is, under the names that routers read."""
    loads = [
        {
            "dp_rank": dp_rank,
            "num_running_reqs": stats["running"],
            "num_waiting_reqs": stats["waiting"],
            "num_total_reqs": stats["running"] + stats["waiting"],
            "token_usage": stats["pages_used"] / max(1, stats["pages_total"]),
            "state_slots_used": stats["slots_used"],
            "state_slots_total": stats["slots_total"],
            "cache_hit_rate": stats["prefix_hits"] / max(1, stats["prefix_queries"]),
        }
        for dp_rank, stats in enumerate(desk.stats()["replicas"])
    ]
    return {"version": __version__, "dp_rank_count": len(loads), "loads": loads}


def server_document(desk: Desk) -> dict[str, Any]:
    """Configuration, every choice with its reason, bytes and counters; nothing secret."""
    stats = dict(desk.stats())
    return {
        **model_document(desk),
        "version": __version__,
        "tp_size": desk.facts.document["layout"]["tp"],
        "dp_size": desk.facts.document["layout"].get("dp_attention", 1),
        **desk.facts.document,
        "weight_updates": desk.weights.updates,
        "counters": stats.pop("counters"),
        "stats": stats,
        "settings": desk.settings.public(),
    }

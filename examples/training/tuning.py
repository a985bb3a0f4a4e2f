"""Bounds the time that fla's kernels spend on tuning: their full lists take minutes to compile, one after another."""

import sys
from typing import Any

KEEP = 3  # configurations a kernel


def shorten(prefix: str = "fla.") -> int:
    """Keep the likeliest configurations of every tuned kernel in loaded modules below `prefix`; returns how many went.

    Likeliest: few stages, then the largest tiles up to 64, then about four warps. Only rounding depends on the choice.
    """
    from triton.runtime.autotuner import Autotuner

    dropped = 0
    for name, module in list(sys.modules.items()):
        if not name.startswith(prefix):
            continue
        for value in list(vars(module).values()):
            while not isinstance(value, Autotuner) and type(value).__name__ == "Heuristics":
                value = value.fn
            if isinstance(value, Autotuner) and len(value.configs) > KEEP:
                dropped += len(value.configs) - KEEP
                value.configs = sorted(value.configs, key=_unlikeliness)[:KEEP]
    return dropped


def _unlikeliness(config: Any) -> tuple[int, int, int]:
    tiles = sum(min(size, 128 - size) for key, size in config.kwargs.items() if key.startswith("B"))
    return config.num_stages, -tiles, abs(config.num_warps.bit_length() - 3)

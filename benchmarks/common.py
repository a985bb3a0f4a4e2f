"""What every benchmark shares: timing by CUDA-graph replay, and result rows that say where they come from.

ANABRANCH_RESULTS names another folder for the rows. Where the tree is a copy without its repository,
ANABRANCH_COMMIT names the commit, with "-dirty" behind it if the copy differs.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton

ROOT = Path(__file__).resolve().parents[1]
BYTES_PER_S = 4.3e12  # measured copy bandwidth of one H200
FLOPS_PER_S = 790e12  # measured dense bf16 rate of one H200


def provenance() -> dict[str, Any]:
    """Device, versions, commit, time and command; the commit is null where there is no repository."""
    commit, dirty = _commit()
    return {
        "device": torch.cuda.get_device_properties(0).name,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
        },
        "commit": commit,
        "dirty": dirty,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
    }


def _commit() -> tuple[str | None, bool | None]:
    if named := os.environ.get("ANABRANCH_COMMIT"):
        return named.removesuffix("-dirty"), named.endswith("-dirty")
    changes = _git("status", "--porcelain")
    return _git("rev-parse", "HEAD"), None if changes is None else bool(changes)


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _clocks() -> str:
    """SM and memory clock, power and temperature as the driver reports them now."""
    query = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True
    )
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 else "nvidia-smi failed"


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Add one JSON line; rows are never rewritten."""
    path = Path(os.environ.get("ANABRANCH_RESULTS", path.parent)) / path.name
    path.parent.mkdir(parents=True, exist_ok=True)
    row = row | {"clocks": _clocks()}  # now, right after the load
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def time_graph(run: Callable[[], Any], calls: int, *, samples: int = 20, warmups: int = 3) -> list[float]:
    """Microseconds of one call: `run` makes `calls` of them, is captured once and replayed once a sample."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compiles, outside the capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(warmups):
        graph.replay()
    times = []
    for _ in range(samples):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / calls)
    return times


def floor_us(moved_bytes: float, flops: float = 0.0) -> float:
    """The longer of memory time and compute time."""
    return max(moved_bytes / BYTES_PER_S, flops / FLOPS_PER_S) * 1e6


def measured(times: list[float], moved_bytes: float, flops: float = 0.0) -> dict[str, Any]:
    """The timing fields of a result row."""
    middle = median(times)
    return {
        "us": [round(t, 3) for t in times],
        "us_median": round(middle, 3),
        "floor_us": round(floor_us(moved_bytes, flops), 3),
        "gbs": round(moved_bytes / middle / 1e3, 1),
    }

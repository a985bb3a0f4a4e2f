"""Where a measurement comes from: commits, versions, machine, devices and their clocks, command, time."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("anabranch", "httpx", "torch", "triton", "vllm", "sglang", "transformers")
_GPU = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
# what decides how fast a server runs here; secrets have other names
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NCCL_DEBUG", "PYTORCH_CUDA_ALLOC_CONF")


def provenance(repositories: Iterable[str | Path] = ()) -> dict[str, Any]:
    """Everything but the measurement itself. `repositories`: folders whose commits matter, beside the current one.

    ANABRANCH_COMMIT names the commit of a tree that was copied without its repository, "-dirty" behind it if changed.
    """
    return {
        "time": now(),
        "command": " ".join(sys.argv),
        "commits": {str(folder): commit(Path(folder)) for folder in dict.fromkeys([".", *map(str, repositories)])},
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": {"system": platform.platform(), "cpu": _cpu(), "cores": _cores(), "load_1m": _load()},
        "devices": devices(),
        "env": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def now() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def commit(folder: Path) -> dict[str, Any] | None:
    """Commit of a working tree and whether it differs from it; None where git knows none."""
    if folder == Path() and (named := os.environ.get("ANABRANCH_COMMIT")):
        return {"commit": named.removesuffix("-dirty"), "dirty": named.endswith("-dirty")}
    found = _run("git", "-C", str(folder), "rev-parse", "HEAD")
    if found is None:
        return None
    return {"commit": found, "dirty": bool(_run("git", "-C", str(folder), "status", "--porcelain"))}


def devices() -> list[str]:
    """One line a GPU, with driver and present clocks, as the driver tells them; none without an NVIDIA driver."""
    return (_run("nvidia-smi", f"--query-gpu={_GPU}", "--format=csv,noheader") or "").splitlines()


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _load() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _run(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None

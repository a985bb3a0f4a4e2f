"""Result rows that say where they come from: device, versions, commit, clocks, command, time.

Where the tree is a copy without its repository, ANABRANCH_COMMIT names the commit, with "-dirty" behind it if the copy
differs. ANABRANCH_RESULTS names another folder for rows that are appended to files.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def provenance(device: torch.device | None = None, command: Sequence[str] | None = None) -> dict[str, Any]:
    """Device, versions, commit, time and command; the commit is null where there is no repository.

    `device`: None is the first GPU.
    """
    commit, dirty = _commit()
    on_cpu = device is not None and device.type != "cuda"
    return {
        "device": "cpu" if on_cpu else torch.cuda.get_device_properties(device or 0).name,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": _version("triton"),
            "cuda": torch.version.cuda,
        },
        "commit": commit,
        "dirty": dirty,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(command or ["python", *map(_shown, sys.argv)]),
    }


def _shown(argument: str) -> str:
    """An argument without what only this machine has: a path from here on, or the last part of one elsewhere."""
    path = Path(argument)
    if not path.is_absolute():
        return argument
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> tuple[str | None, bool | None]:
    if named := os.environ.get("ANABRANCH_COMMIT"):
        return named.removesuffix("-dirty"), named.endswith("-dirty")
    changes = _git("status", "--porcelain")
    return _git("rev-parse", "HEAD"), None if changes is None else bool(changes)


def _git(*arguments: str) -> str | None:
    if not (ROOT / ".git").exists():  # an installed package may lie inside another project's tree
        return None
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def clocks() -> str | None:
    """SM and memory clock, power and temperature as the driver reports them now; None without an NVIDIA driver."""
    query = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True
        )
    except OSError:
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 else "nvidia-smi failed"


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Add one JSON line; rows are never rewritten. A row without clocks gets those of now, right after the load."""
    path = Path(os.environ.get("ANABRANCH_RESULTS", path.parent)) / path.name
    path.parent.mkdir(parents=True, exist_ok=True)
    if "clocks" not in row:
        row = row | {"clocks": clocks()}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")

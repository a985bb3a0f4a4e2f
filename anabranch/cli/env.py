"""`anabranch env`: what this installation is, where it runs, and what it would choose here, with the reasons."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import anabranch

if TYPE_CHECKING:
    import torch

_PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers")


def env(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of text.")] = False,
) -> None:
    """Print versions, devices, operations and defaults."""
    document = env_document()
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        _print(document)


def env_document() -> dict[str, Any]:
    """Everything `env` prints, as JSON values; memory in bytes, null where something is absent."""
    import torch

    devices = [*_gpus(), _cpu()]
    on_gpu = devices[0]["kind"] == "cuda"
    return {
        "anabranch": anabranch.__version__,
        "source": _source(Path(anabranch.__file__).resolve().parents[1]),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "torch_cuda": torch.version.cuda,
        "extras": _extras(),
        "devices": devices,
        "dtype": {
            "default": "the checkpoint's" if on_gpu else "float32",
            "reason": "a GPU computes in it" if on_gpu else "no GPU, and float32 holds every bfloat16 weight",
        },
        "threads": {
            "usable_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "torch": torch.get_num_threads(),
            "torch_interop": torch.get_num_interop_threads(),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        },
        "ops": list(_ops(torch.device(devices[0]["kind"]))),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _source(root: Path) -> dict[str, Any]:
    """The git commit of the source tree, if it is one; `dirty` counts untracked files too."""
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return {"commit": None, "dirty": None}

    def ask(*words: str) -> str | None:
        done = subprocess.run([git, "-C", str(root), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    status = ask("status", "--porcelain")
    return {"commit": ask("rev-parse", "--verify", "HEAD"), "dirty": None if status is None else bool(status)}


def _extras() -> dict[str, dict[str, bool]]:
    """For each optional extra, its packages and whether they can be imported; nothing is imported to find out."""
    modules: dict[str, list[str]] = {}
    for module, packages in metadata.packages_distributions().items():
        for package in packages if module.isidentifier() else ():
            modules.setdefault(_normal(package), []).append(module)
    extras: dict[str, dict[str, bool]] = {}
    for requirement in metadata.requires("anabranch") or ():
        package, extra = re.match(r"[\w.-]+", requirement), re.search(r"extra == [\"']([\w.-]+)[\"']", requirement)
        if package and extra:
            found = any(find_spec(module) is not None for module in modules.get(_normal(package[0]), ()))
            extras.setdefault(extra[1], {})[package[0]] = found
    return extras


def _normal(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def _gpus() -> Iterator[dict[str, Any]]:
    import torch

    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        yield {
            "kind": "cuda",
            "name": gpu.name,
            "capability": f"{gpu.major}.{gpu.minor}",
            "sm_count": gpu.multi_processor_count,
            "memory_bytes": gpu.total_memory,
            "driver": _driver(),
        }


def _driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    return lines[0].strip() if lines else None


def _cpu() -> dict[str, Any]:
    import torch

    info = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return {
        "kind": "cpu",
        "name": model[1] if model else platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _ops(device: "torch.device") -> Iterator[dict[str, Any]]:
    """Every operation, its implementations in order of preference, and what either mode chooses on this device."""
    from anabranch.ops.registry import IMPLEMENTATIONS, select

    no_model: Any = None  # no rule looks at the model
    normal = select(no_model, device).chosen
    deterministic = select(no_model, device, deterministic=True).chosen
    for name, implementations in IMPLEMENTATIONS.items():
        yield {
            "name": name,
            "implementations": [implementation.name for implementation in implementations],
            "chosen": dict(zip(("implementation", "reason"), normal[name], strict=True)),
            "deterministic": dict(zip(("implementation", "reason"), deterministic[name], strict=True)),
        }


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 100, markup=False, highlight=False)
    source = document["source"]
    tree = f"commit {source['commit'] or 'none'}{', dirty' if source['dirty'] else ''}"
    console.print(f"anabranch {document['anabranch']} ({tree if source['dirty'] is not None else 'no source tree'})")
    console.print(f"python {document['python']} on {document['platform']}")
    console.print(", ".join(f"{name} {version or 'absent'}" for name, version in document["packages"].items()))
    for extra, packages in document["extras"].items():
        absent = [name for name, found in packages.items() if not found]
        console.print(f"extra {extra}: {'absent ' + ', '.join(absent) if absent else 'complete'}")
    for device in document["devices"]:
        facts = ", ".join(f"{key} {value}" for key, value in device.items() if key not in ("kind", "name"))
        console.print(f"{device['kind']}: {device['name']}, {facts}")
    console.print(f"dtype: {document['dtype']['default']} ({document['dtype']['reason']})")
    console.print("threads: " + ", ".join(f"{key} {value}" for key, value in document["threads"].items()))
    table = Table("op", "chosen", "reason", "deterministic", "reason", box=None, padding=(0, 2, 0, 0))
    for op in document["ops"]:
        table.add_row(op["name"], *op["chosen"].values(), *op["deterministic"].values())
    console.print(table)

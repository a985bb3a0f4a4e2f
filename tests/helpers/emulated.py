"""CUDA kernels built with g++ over tests/helpers/emulator and loaded as the real ones are: same sources, same entry."""

import shutil
import subprocess
import tempfile
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch.ops import native

EMULATOR = Path(__file__).parent / "emulator"


@cache
def module(folder: str, unit: str = "") -> Any:
    """The emulated module of an operation, or of one of its units, built once for each state of its sources."""
    import tvm_ffi
    from tvm_ffi import libinfo

    csrc = native.OPS / folder / "csrc"
    digest = sha256()
    for path in sorted([*EMULATOR.iterdir(), *native._sources(folder)]):
        digest.update(path.read_bytes())
    target = Path(tempfile.gettempdir()) / "anabranch-emulator" / f"{unit or folder}-{digest.hexdigest()[:16]}.so"
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        places = [EMULATOR, csrc, libinfo.find_include_path(), libinfo.find_dlpack_include_path()]
        with tempfile.TemporaryDirectory(dir=target.parent) as place:  # moved at the end: other processes build it too
            out = Path(place) / target.name
            command = ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", *(f"-I{p}" for p in places)]
            link = ["-L", str(Path(libinfo.find_libtvm_ffi()).parent), "-ltvm_ffi"]
            subprocess.run([*command, "-o", str(out), str(EMULATOR / f"{unit or folder}.cpp"), *link], check=True)
            out.replace(target)
    return tvm_ffi.load_module(str(target))


def loaded(monkeypatch: pytest.MonkeyPatch, folder: str, unit: str = "") -> Any:
    """`module` in place of the real library for one test, with the first order of threads and the first inputs."""
    torch.manual_seed(0)
    built = module(folder, unit)
    built.seed(1)
    monkeypatch.setattr(native, "load", lambda folder: built)
    return built


def why_not() -> str | None:
    """The reason that nothing can be emulated here, or None."""
    return None if shutil.which("g++") else "no g++ to build the emulated kernels"

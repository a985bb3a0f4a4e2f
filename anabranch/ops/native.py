"""CUDA C++ of an operation: compiled once with nvcc for Hopper, kept in a cache folder, loaded through tvm-ffi.

The sources are `ops/<folder>/csrc/*.cu`; headers that operations share are in `ops/csrc/`. Building and loading need
the extra `cuda` (apache-tvm-ffi); building also needs nvcc 12.8 or newer. Environment: ANABRANCH_CACHE names the cache
folder (default ~/.cache/anabranch); a library built elsewhere is found there by the hash of its sources.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from anabranch.config.verdict import Verdict

OPS = Path(__file__).parent
ARCH = "-gencode=arch=compute_90a,code=sm_90a"
_BORROWED = re.compile(r'#include "\.\./(\w+)/csrc/')  # as seen from ops/csrc
FLAGS = (ARCH, "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", "-Xptxas", "-v", "-split-compile", "0")


def _sources(folder: str) -> Iterator[Path]:
    """Every file that the library of an operation is built from, in a fixed order, with headers that it borrows."""
    own = [path for place in (OPS / "csrc", OPS / folder / "csrc") for path in sorted(place.glob("*.cu*"))]
    yield from own
    for lender in sorted({name for path in own for name in _BORROWED.findall(path.read_text())}):
        yield from sorted((OPS / lender / "csrc").glob("*.cuh"))


def library(folder: str) -> Path:
    """Where the library of an operation lies, or would lie once built."""
    digest = sha256(" ".join(FLAGS).encode())
    for path in _sources(folder):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    place = os.environ.get("ANABRANCH_CACHE") or Path.home() / ".cache" / "anabranch"
    return Path(place) / "native" / f"{folder}-{digest.hexdigest()[:16]}.so"


def nvcc() -> str | None:
    """The CUDA compiler: $CUDA_HOME/bin/nvcc, the one on PATH, or None."""
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
    return str(home) if home.exists() else shutil.which("nvcc")


def verdict(folder: str) -> Verdict:
    """Whether the CUDA kernels of an operation can be had on this machine."""
    if find_spec("tvm_ffi") is None:
        return Verdict(False, "needs the package apache-tvm-ffi (extra 'cuda')")
    if library(folder).exists():
        return Verdict(True, "built before")
    return Verdict(True, "to be built by nvcc") if nvcc() else Verdict(False, "needs nvcc to build its kernels")


def build(folder: str) -> tuple[Path, str]:
    """Compile the kernels of an operation: the library's path and the assembler's report of registers and spills.

    Raises:
        RuntimeError: nvcc is missing or refused the source; the message carries its output.
    """
    target, compiler = library(folder), nvcc()
    if compiler is None:
        raise RuntimeError(f"{folder}: no nvcc on PATH or in $CUDA_HOME to build its kernels")
    from tvm_ffi import libinfo

    includes = [OPS / "csrc", libinfo.find_include_path(), libinfo.find_dlpack_include_path()]
    link = ["-L", str(Path(libinfo.find_libtvm_ffi()).parent), "-ltvm_ffi"]
    units = [str(path) for path in _sources(folder) if path.suffix == ".cu"]
    target.parent.mkdir(parents=True, exist_ok=True)
    # built beside and moved, so that no other process ever loads half a library
    with tempfile.TemporaryDirectory(dir=target.parent) as place:
        out = Path(place) / target.name
        command = [compiler, *FLAGS, *(f"-I{path}" for path in includes), "-o", str(out), *units, *link]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{folder}: nvcc failed ({' '.join(command)})\n{done.stderr}")
        out.replace(target)
    return target, done.stdout + done.stderr


@cache
def load(folder: str) -> Any:
    """The loaded module of an operation; its functions take torch tensors and run on the current stream."""
    import tvm_ffi

    if not library(folder).exists():
        build(folder)
    return tvm_ffi.load_module(str(library(folder)))

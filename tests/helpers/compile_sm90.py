"""Compile every kernel that a launcher would launch for an H200, without a GPU, and read what the compiler used."""

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SHARED_LIMIT = 232_448  # bytes a block may ask for on sm_90; the compiler does not check it
TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"


class FakeDriver:
    """Answers what the compiler asks about a device that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 90

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def get_benchmarker(self) -> Callable[..., tuple[float, ...]]:
        return lambda fn, quantiles=None, **options: (1.0, 1.0, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """One compiled kernel: bytes of shared memory, registers a thread, bytes of spilled locals, and its PTX."""

    name: str
    shared: int
    registers: int
    spilled: int
    ptx: str


class Compiled(list):
    """Kernels in the order of their launch."""

    def usage(self) -> list[Usage]:
        return [_usage(kernel) for kernel in self]

    def check(self) -> list[Usage]:
        """Raise AssertionError unless every kernel fits and none spills."""
        used = self.usage()
        assert used, "nothing was launched"
        for u in used:
            assert u.shared <= SHARED_LIMIT, f"{u.name} asks for {u.shared} bytes of shared memory"
            assert not u.spilled, f"{u.name} spills {u.spilled} bytes at {u.registers} registers"
        return used


def record(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Compiled:
    """From here on a launch compiles and returns; meta tensors will do as arguments."""
    compiled, run = Compiled(), JITFunction.run
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.setattr(driver, "_active", FakeDriver())

    def launch(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.append(kernel)
        return kernel

    monkeypatch.setattr(JITFunction, "run", launch)
    return compiled


def _usage(kernel: Any) -> Usage:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [TOOLS / "cuobjdump", "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return Usage(
        name=kernel.metadata.name,
        shared=kernel.metadata.shared,
        registers=found["REG"],
        spilled=found["LOCAL"] + found["STACK"],
        ptx=kernel.asm["ptx"],
    )

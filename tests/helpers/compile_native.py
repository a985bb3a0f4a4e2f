"""CUDA C++ of an operation compiled for an H200, and what the assembler said of each kernel."""

import re
from collections.abc import Callable
from typing import NamedTuple

from anabranch.ops import native

_KERNEL = r"entry function '(\S+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"


class Kernel(NamedTuple):
    """`name` is mangled; `spilled` is in bytes."""

    name: str
    registers: int
    spilled: int


Assembled = Callable[[str], tuple[str, list[Kernel]]]


def assemble(folder: str) -> tuple[str, list[Kernel]]:
    """The whole report, and its kernels."""
    library, report = native.build(folder)
    assert library == native.library(folder)
    assert library.exists()
    found = re.findall(_KERNEL, report, re.DOTALL)
    return report, [Kernel(name, int(used), int(stores) + int(loads)) for name, stores, loads, used in found]

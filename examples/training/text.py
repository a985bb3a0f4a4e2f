"""English and Python from the standard library of the running interpreter: documentation, docstrings, sources.

Licence: PSF-2.0 (NOTICE). Tests, generated tables and installed packages are left out.
"""

import ast
import inspect
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

_LEFT_OUT = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "encodings", "lib2to3"}
_LEFT_OUT |= {"pydoc_data", "ensurepip", "turtledemo", "__pycache__", "config-3.11-x86_64-linux-gnu"}
HELD_OUT = 24  # one file or topic in so many is held out
SOURCE_BYTES = 60_000  # of one file


def texts(held_out: bool) -> Iterator[str]:
    """Documents in a fixed order for one version of Python: topics, then each file's docstrings and its source."""
    for name, text in sorted(_topics().items()):
        if _is_held_out(name) == held_out:
            yield text
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if _LEFT_OUT.isdisjoint(name.parts) and _is_held_out(str(name)) == held_out:
            yield from _of_file(file)


def _is_held_out(name: str) -> bool:
    return zlib.crc32(name.encode()) % HELD_OUT == 0


def _topics() -> dict[str, str]:
    from pydoc_data.topics import topics

    return topics


def _of_file(file: Path) -> Iterator[str]:
    try:
        source = file.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in docstrings
            tree = ast.parse(source)
    except (UnicodeDecodeError, SyntaxError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
            if len(text) >= 40 and text.isascii():
                yield text
    if source.isascii():
        yield source[:SOURCE_BYTES]

"""What a report is made of, before it is HTML or Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Table:
    """Text cells; all columns but the first `words` hold figures."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    words: int = 1


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading with what is below it; `charts` are SVG pictures, `fold` hides detail where that can be done."""

    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    charts: Sequence[str] = ()
    fold: bool = False

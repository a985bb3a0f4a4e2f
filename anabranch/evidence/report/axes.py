"""Scales and axes of the charts, and the colours that they take from the page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
:root{color-scheme:light dark;--ink:#1c2024;--soft:#5b636c;--line:#d5dae0;--paper:#fff;--panel:#f5f7f9;
--a:#1f66c7;--b:#b8500a;--both:#b9c1ca;--third:#2a7d4f;--fourth:#8a3fa0}
@media (prefers-color-scheme:dark){:root{--ink:#e6e9ec;--soft:#a2abb5;--line:#3a424b;--paper:#14181c;--panel:#1c2227;
--a:#7ab2ff;--b:#ffa45c;--both:#56616d;--third:#6fcf97;--fourth:#d79be8}}
@media print{:root{color-scheme:light;--ink:#000;--soft:#444;--line:#bbb;--paper:#fff;--panel:#fff;
--a:#1f66c7;--b:#b8500a;--both:#b9c1ca;--third:#2a7d4f;--fourth:#8a3fa0}}
svg{font-family:system-ui,sans-serif;font-size:11px}
svg text{fill:var(--ink)}svg .soft{fill:var(--soft)}svg .grid{stroke:var(--line);stroke-width:1;fill:none}
svg .axis{stroke:var(--soft);stroke-width:1;fill:none}svg .band{fill:var(--both);opacity:.35}
svg .zero{stroke:var(--ink);stroke-width:1}svg .end{text-anchor:end}svg .mid{text-anchor:middle}
svg .name{font-weight:600}svg .inbox{font-size:9px;fill:var(--ink);pointer-events:none}
svg .over{fill:var(--paper)}
svg .f0{fill:var(--a)}svg .f1{fill:var(--b)}svg .f2{fill:var(--third)}svg .f3{fill:var(--fourth)}
svg .s0{stroke:var(--a)}svg .s1{stroke:var(--b)}svg .s2{stroke:var(--third)}svg .s3{stroke:var(--fourth)}
svg .s0,svg .s1,svg .s2,svg .s3{fill:none;stroke-width:2}svg .s1{stroke-dasharray:6 3}svg .s3{stroke-dasharray:2 3}
svg .both{fill:var(--both)}svg .box{stroke:var(--paper);stroke-width:.6}
"""


@dataclass(frozen=True, slots=True)
class Scale:
    """Linear map from values [low, high] to pixels [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, about: int) -> list[float]:
        """Round numbers inside the scale, roughly `about` of them."""
        step = nice_step((self.high - self.low) / max(1, about))
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def scale(values: Sequence[float], start: float, end: float, *, zero: bool = False, about: int = 5) -> Scale:
    """A scale over all values with a little air, from 0 if asked; one value alone gets room on both sides."""
    low, high = min(values), max(values)
    if zero:
        low, high = min(0.0, low), max(0.0, high)
    if high - low < 1e-9 * max(abs(high), abs(low), 1e-9):
        room = abs(high) * 0.05 or 1.0
        low, high = low - room, high + room
    step = nice_step((high - low) / about)
    below = math.floor(low / step + 1e-9) * step
    return Scale(below, math.ceil(high / step - 1e-9) * step, start, end)


def nice_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= rough * 0.999), 10 * power)


def tick_text(value: float, step: float) -> str:
    """With the decimals that tell neighbours apart, and no more."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{0.0 if abs(value) < step / 1e6 else value:,.{decimals}f}"


def x_axis(x: Scale, top: float, bottom: float, title: str, about: int = 5) -> str:
    """Grid lines, numbers and the title, which names the unit."""
    ticks = x.ticks(about)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else x.high - x.low
    parts = [f'<line class="axis" x1="{x.start:.1f}" x2="{x.end:.1f}" y1="{bottom}" y2="{bottom}"/>']
    for tick in ticks:
        at = x(tick)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(f'<text class="soft mid" x="{at:.1f}" y="{bottom + 14}">{tick_text(tick, step)}</text>')
    middle = (x.start + x.end) / 2
    return "".join(parts) + f'<text class="mid" x="{middle:.1f}" y="{bottom + 30}">{escape(title)}</text>'


def y_axis(y: Scale, left: float, right: float, title: str, about: int = 4) -> str:
    """Grid lines, numbers and the title above the axis, where it needs no turned letters."""
    ticks = y.ticks(about)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else y.high - y.low
    parts = []
    for tick in ticks:
        at = y(tick)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="soft end" x="{left - 5}" y="{at + 4:.1f}">{tick_text(tick, step)}</text>')
    return "".join(parts) + f'<text x="4" y="{min(y.start, y.end) - 9:.1f}">{escape(title)}</text>'


def svg(width: float, height: float, title: str, body: str, css: str = "chart") -> str:
    """One picture that scales with its place; `title` is what a screen reader says."""
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    label = escape(title, quote=True)
    return f'<svg xmlns="http://www.w3.org/2000/svg" class="{css}" {size} role="img" aria-label="{label}">{body}</svg>'


def standalone(picture: str) -> str:
    """The same picture as a file of its own, colours included."""
    head, _, rest = picture.partition(">")
    backdrop = '<rect width="100%" height="100%" style="fill:var(--paper)"/>'
    return f"{head}><style>{STYLE}</style>{backdrop}{rest}\n"

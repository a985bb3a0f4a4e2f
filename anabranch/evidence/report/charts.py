"""The charts of a report, each one SVG picture: distributions, runs in order, intervals."""

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil

from anabranch.evidence.report.axes import Scale, scale, svg, x_axis, y_axis

WIDTH, LEFT, RIGHT = 384, 52, 372  # a chart stays legible on a page of 360 px


def distribution(samples: Mapping[str, Sequence[float]], axis: str) -> str:
    """Share of requests (percent) at or below each value, a line an arm; `axis` names the value and its unit."""
    height, top, bottom = 250, 48, 200
    x = scale([value for values in samples.values() for value in values], LEFT, RIGHT)
    y = Scale(0, 100, bottom, top)
    parts = [y_axis(y, LEFT, RIGHT, "requests at or below, %"), x_axis(x, top, bottom, axis), legend(list(samples))]
    for index, values in enumerate(samples.values()):
        ranked, steps = sorted(values), []
        for position, value in enumerate(_thinned(ranked)):
            share = 100 * position / max(1, len(_thinned(ranked)) - 1)
            steps.append(f"{x(value):.1f},{y(share):.1f}")
        parts.append(f'<polyline class="s{index % 4}" points="{" ".join(steps)}"/>')
    return svg(WIDTH, height, f"Distribution of {axis}", "".join(parts))


def _thinned(ranked: Sequence[float], points: int = 200) -> Sequence[float]:
    """Evenly spaced ranks, both ends kept: a picture has no more pixels."""
    if len(ranked) <= points:
        return ranked
    return [ranked[round(i * (len(ranked) - 1) / (points - 1))] for i in range(points)]


def runs(points: Sequence[tuple[str, str, float]], axis: str) -> str:
    """One dot for each run (label, arm, value), in the order in which they ran."""
    height, top, bottom = 250, 48, 200
    arms = list(dict.fromkeys(arm for _, arm, _ in points))
    y = scale([value for _, _, value in points], bottom, top)
    step = (RIGHT - LEFT) / len(points)
    parts = [y_axis(y, LEFT, RIGHT, axis), legend(arms)]
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    every = ceil(len(points) / 12)
    for index, (label, arm, value) in enumerate(points):
        at, tone = LEFT + (index + 0.5) * step, arms.index(arm) % 4
        title = f"<title>{escape(label)} {escape(arm)}: {value:,.6g}</title>"
        parts.append(f'<circle class="f{tone}" cx="{at:.1f}" cy="{y(value):.1f}" r="4.5">{title}</circle>')
        if index % every == 0:
            parts.append(f'<text class="soft mid" x="{at:.1f}" y="{bottom + 14}">{escape(label)}</text>')
    middle = (LEFT + RIGHT) / 2
    parts.append(f'<text class="mid" x="{middle}" y="{bottom + 30}">runs, in the order in which they ran</text>')
    return svg(WIDTH, height, f"{axis} of every run", "".join(parts))


def intervals(rows: Sequence[tuple[str, float, float, float]], spread_pct: float | None) -> str:
    """Change in percent with its interval (name, change, low, high); the band is what A against A differs by."""
    top, pitch = 22, 34
    bottom = top + pitch * len(rows)
    band = spread_pct or 0.0
    values = [value for row in rows for value in row[1:]] + [band, -band, 0.0]
    x = scale(values, 12, RIGHT)
    parts = []
    if band:
        ends = x(-band), x(band)
        parts.append(f'<rect class="band" x="{ends[0]:.1f}" y="{top}" width="{ends[1] - ends[0]:.1f}" '
                     f'height="{bottom - top}"/>')  # fmt: skip
        parts.append(f'<text class="soft" x="12" y="13">shaded: A against A, {band:.2g} %</text>')
    parts.append(x_axis(x, top, bottom, "change from the first arm to the second, %"))
    parts.append(f'<line class="zero" x1="{x(0):.1f}" x2="{x(0):.1f}" y1="{top}" y2="{bottom}"/>')
    for index, (name, change, low, high) in enumerate(rows):
        line = top + pitch * index + 24
        parts.append(f'<text x="14" y="{line - 9}">{escape(name)}: {change:+.2f} %</text>')
        parts.append(f'<line class="s0" x1="{x(low):.1f}" x2="{x(high):.1f}" y1="{line}" y2="{line}"/>')
        parts.append(f'<circle class="f0" cx="{x(change):.1f}" cy="{line}" r="4"/>')
    return svg(WIDTH, bottom + 40, "Change of each metric with its interval", "".join(parts))


def legend(names: Sequence[str], y: float = 14, left: float = 4) -> str:
    """A short line in the colour of each name, side by side."""
    parts, at = [], left
    for index, name in enumerate(names[:4]):
        text = name if len(name) <= 20 else name[:19] + "…"
        parts.append(f'<line class="s{index}" x1="{at}" x2="{at + 20}" y1="{y - 4}" y2="{y - 4}"/>')
        parts.append(f'<text x="{at + 25}" y="{y}">{escape(text)}</text>')
        at += 37 + 6.6 * len(text)
    return "".join(parts)

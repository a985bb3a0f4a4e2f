"""The timeline of a trace document: slices above one another, opened at the same moment, streams as rows."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import ceil
from typing import Any

from anabranch.evidence.report.axes import Scale, nice_step, svg, x_axis
from anabranch.evidence.report.charts import legend
from anabranch.evidence.trace.events import short

WIDTH, LEFT, ROW, TOP = 1120, 96, 18, 40
NARROW = 0.25  # pixels: two launches of a lane that are nearer than this are drawn as one


def timeline(arms: Sequence[Mapping[str, Any]]) -> str:
    """The representative slice of each arm. Launches that only one arm has are coloured, those of both are grey."""
    longest = max(box["start"] + box["took"] for arm in arms for box in _boxes(arm)) / 1e3
    step = nice_step(max(longest, 1e-3) / 10)
    x = Scale(0, max(1, ceil(longest / step)) * step, LEFT, WIDTH - 20)
    names = [{box["name"] for box in _boxes(arm)} for arm in arms]
    everywhere = set.intersection(*names) if len(names) > 1 else set()
    parts, y = [_key(arms)], TOP + 4.0
    for index, arm in enumerate(arms):
        begin, wall = y, arm["shown"]["wall"] / 1e3
        title = f"{arm['label']}: step {arm['shown']['step']}, wall {wall:,.3f} us"
        parts.append(f'<text class="name" x="4" y="{y + 4}">{escape(title)}</text>')
        y += 12
        for track in arm["shown"]["tracks"]:
            parts.append(f'<text class="soft end" x="{LEFT - 8}" y="{y + 13}">stream {track["stream"]}</text>')
            for box in _visible(track, x):
                parts.append(_box(box, x, y + ROW * box["lane"], box["name"] in everywhere, index % 4))
            y += ROW * track["lanes"] + 4
        close = x(wall)
        parts.append(f'<line class="s{index % 4}" x1="{close:.1f}" x2="{close:.1f}" y1="{begin}" y2="{y}"/>')
        y += 16
    axis = x_axis(x, TOP, y, "time since the slice opened, us", about=10)
    return svg(WIDTH, y + 40, "Timeline of the slices", axis + "".join(parts), css="chart wide")


def _key(arms: Sequence[Mapping[str, Any]]) -> str:
    key, at = '<text x="4" y="14">upright lines: where the slice closes</text>', 320.0
    if len(arms) > 1:
        labels = [f"only {arm['label']}" for arm in arms]
        key += legend(labels, left=at)
        at += sum(37 + 6.6 * min(20, len(label)) for label in labels)
        key += f'<rect class="both" x="{at}" y="5" width="20" height="10"/><text x="{at + 25}" y="14">in both</text>'
    return key


def _boxes(arm: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [box for track in arm["shown"]["tracks"] for box in track["events"]]


def _visible(track: Mapping[str, Any], x: Scale) -> Iterator[dict[str, Any]]:
    """Launches of a stream less those that a reader could not tell from the one before: a page stays small."""
    reach: dict[int, float] = {}
    for box in track["events"]:
        end = x((box["start"] + box["took"]) / 1e3)
        if end - reach.get(box["lane"], -1.0) >= NARROW:
            reach[box["lane"]] = end
            yield box


def _box(box: Mapping[str, Any], x: Scale, y: float, shared: bool, tone: int) -> str:
    start, end = box["start"] / 1e3, (box["start"] + box["took"]) / 1e3
    at, wide = x(start), max(0.5, x(end) - x(start))
    name = short(box["name"])
    colour = "both" if shared else f"f{tone}"
    drawn = f'<rect class="box {colour}" x="{at:.2f}" y="{y:.1f}" width="{wide:.2f}" height="{ROW - 2}">'
    drawn += f"<title>{escape(name)}\n{box['took'] / 1e3:,.3f} us from {start:,.3f} us</title></rect>"
    room = int((wide - 4) / 5)
    if room >= 6:
        text, css = name if len(name) <= room else name[: room - 1] + "…", "inbox" if shared else "inbox over"
        drawn += f'<text class="{css}" x="{at + 2:.1f}" y="{y + 11:.1f}">{escape(text)}</text>'
    return drawn

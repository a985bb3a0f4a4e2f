"""The report says what the run directory holds, as one page that needs nothing else, as Markdown and as JSON."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from helpers.published_traces import PUBLISHED, decode
from helpers.run_directory import ARMS, comparison, requests, summary, write
from typer.testing import CliRunner

from anabranch.cli.main import app
from anabranch.evidence.report.build import build
from anabranch.evidence.report.html import to_html
from anabranch.evidence.report.markdown import to_markdown
from anabranch.evidence.report.write import write_report
from anabranch.evidence.rundir import RunDir


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A run with a trace document beside it."""
    folder = tmp_path_factory.mktemp("run")
    files = [str(decode(arm, folder / f"{arm}.sqlite")) for arm in PUBLISHED]
    run = write(folder / "run")
    words = ["trace", "diff", *files, "--label", "unfused,fused", "--range", "10:11"]
    done = CliRunner().invoke(app, [*words, "--json", str(run / "traces" / "decode.json")])
    assert done.exit_code == 0, done.output
    return run


class Page(HTMLParser):
    """Every tag is closed, and no tag or attribute reaches out of the page."""

    VOID = ("meta",)

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def pictures(page):
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def classed(root, name):
    return [node for node in root.iter() if name in node.get("class", "").split()]


def test_the_page_is_whole_and_needs_no_script_and_no_network(traced):
    text = to_html(build(traced))
    page = Page(text)
    assert page.open == []
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "img", "iframe", "object", "base"})
    assert all(name not in attributes for _, attributes in page.tags for name in ("src", "href", "style", "onclick"))
    assert "url(" not in text
    assert "@import" not in text
    assert set(re.findall(r"https?://[^\"' <]*", text)) == {"http://www.w3.org/2000/svg"}
    assert "prefers-color-scheme:dark" in text
    assert "@media print" in text
    assert "<one & two>" in " ".join(page.words)  # the title, not markup


def test_verdict_figures_and_provenance_are_in_every_form(traced):
    report = build(traced)
    page, markdown = " ".join(Page(to_html(report)).words), to_markdown(report).replace("\\", "")
    for text in (page, markdown):
        for word in (
            "whole against separate, output_throughput: faster, +2.19 %", "interval +1.18 % to +3.21 %",
            "A against A differs by up to 0.4 %", "3,055.3", "3,122.1", "-2.14 %", "screening",
            "a difference belongs to none of them alone", "C1 C2 A1 B1 A2 B2", "25b684c", "2,048", "case prompt-7",
            "position 19", "NVIDIA H200, 580.1", "mcnemar / only_a", "anabranch serve tiny-k3 --fusion kda=whole",
            "-1.31 %", "nvjet_sm103_tst_qkvg", "+351.697",
        ):  # fmt: skip
            assert word in text, word
    assert report.document["summary"]["comparison"][0]["ratio"] == 1.02186
    assert report.document["summary"]["comparison"][2]["ci_low"] is None
    assert list(report.document["traces"]) == ["decode"]


def test_distributions_pool_the_measured_runs_and_leave_failures_and_the_control_out(traced):
    found = build(traced).document["distributions_ms"]
    for arm, seeds in zip(ARMS, ((2, 4), (3, 5)), strict=True):
        rows = [row for seed in seeds for row in requests(seed, 0.98 if arm == "whole" else 1.0) if row.ok]
        ttft = sorted(round(row.first_s, 6) - round(row.start_s, 6) for row in rows)
        assert found["ttft"][arm]["count"] == 126
        assert found["ttft"][arm]["p100"] == pytest.approx(ttft[-1] * 1e3)
        assert found["ttft"][arm]["p0"] == pytest.approx(ttft[0] * 1e3)
        assert found["itl"][arm]["count"] == 126 * 15


def test_every_picture_has_axes_with_units_and_keeps_inside_its_frame(traced):
    drawn = pictures(to_html(build(traced)))
    assert len(drawn) == 1 + 4 + 1 + 1  # intervals, distributions, runs, timeline
    for root in drawn:
        width, height = (float(v) for v in root.get("viewBox").split()[2:])
        words = [text for node in root.iter() for text in [node.text] if text and node.tag.endswith("text")]
        assert any(re.search(r"(, (ms|us|%|tok/s)$)|runs, in the order", word) for word in words), words
        assert classed(root, "axis")
        assert len(classed(root, "mid")) >= 3
        for node in root.iter():
            for name, limit in (
                ("x", width),
                ("x1", width),
                ("x2", width),
                ("cx", width),
                ("y", height),
                ("cy", height),
            ):
                if name in node.attrib:
                    assert -0.5 <= float(node.get(name)) <= limit + 0.5, (node.tag, node.attrib)
            if node.tag.endswith("rect") and node.get("width"):
                assert float(node.get("x")) + float(node.get("width")) <= width + 0.5
        # letters are about 0.6 of their size wide: none is cut off on the right
        for node in root.iter():
            if node.tag.endswith("text") and "end" not in node.get("class", "") and "mid" not in node.get("class", ""):
                assert float(node.get("x")) + 5.5 * len(node.text) * ("inbox" not in node.get("class", "")) <= width


def test_pictures_meant_for_a_phone_are_no_wider_than_their_letters_allow(traced):
    for root in pictures(to_html(build(traced))):
        width = float(root.get("viewBox").split()[2])
        assert width <= 400 or "wide" in root.get("class").split()


def test_the_timeline_marks_what_only_one_arm_has(traced):
    root = next(r for r in pictures(to_html(build(traced))) if "wide" in r.get("class"))
    boxes = classed(root, "box")
    assert len(boxes) == 114 + 105
    assert len(classed(root, "both")) - 1 == 2 * (105 - 6)  # one more in the key; f_b is in both
    assert [sum(f"f{tone}" in box.get("class").split() for box in boxes) for tone in (0, 1)] == [15, 6]
    rows = {float(box.get("y")) for box in boxes}
    assert len(rows) == 4  # two streams of each arm


def test_distribution_lines_rise_to_100_percent(traced):
    for root in pictures(to_html(build(traced)))[1:5]:
        lines = [node for node in root.iter() if node.tag.endswith("polyline")]
        assert len(lines) == 2
        for line in lines:
            points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
            assert points == sorted(points, key=lambda point: (point[0], -point[1]))
            assert (points[0][1], points[-1][1]) == (200.0, 48.0)


def test_markdown_tables_are_whole_and_markup_in_names_is_text(traced, tmp_path):
    made = summary(title="a | b <script> *c*", comparison=[comparison(metric="x|y_"), comparison()])
    for text in (to_markdown(build(traced)), to_markdown(build(write(tmp_path / "run", made)))):
        blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
        assert len(blocks) >= 5
        for block in blocks:
            lines = block.splitlines()
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1, block
            assert set(lines[1]) <= set("|-: ")
    assert text.startswith("# a \\| b \\<script\\> \\*c\\*\n")
    assert text.count("<details>") == text.count("</details>") == 1


def test_a_run_without_comparison_rows_or_traces_still_reports(tmp_path):
    bare = summary(
        comparison=[], control=None, exact={}, accuracy={}, warnings=["partial: 6 of 6 runs are missing"], runs=[]
    )
    report = build(write(tmp_path / "run", bare))
    assert report.headline == "Nothing was compared."
    assert [section.title for section in report.sections] == ["Verdict", "Runs", "Arms", "Provenance"]
    assert "partial: 6 of 6 runs are missing" in to_html(report)
    assert pictures(to_html(report)) == []
    to_markdown(report)


def test_a_single_run_of_one_request_has_pictures_too(tmp_path):
    made = summary()
    path = write(tmp_path / "run", replace(made, runs=made.runs[2:4]))
    for run in made.runs[2:4]:
        slot = run.file.removeprefix("requests/").removesuffix(".jsonl")
        RunDir.open(path).write_rows("requests", slot, [row.to_json() for row in requests(1, 1.0, count=4)[:1]])
    assert len(pictures(to_html(build(path)))) == 1 + 4 + 1


def test_the_verb_writes_three_files_again_and_measures_nothing(traced, tmp_path):
    before = {path: path.read_bytes() for path in traced.rglob("*") if path.is_file()}
    done = CliRunner().invoke(app, ["report", str(traced), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    names = ["report.html", "report.md", "report.json"]
    assert done.stdout.splitlines() == [f"wrote {tmp_path / 'out' / name}" for name in names]
    assert {path: path.read_bytes() for path in traced.rglob("*") if path.is_file()} == before
    assert json.loads((tmp_path / "out" / "report.json").read_text())["format"] == "anabranch-report/1"
    first = [(tmp_path / "out" / name).read_text() for name in names]
    assert [path.read_text() for path in write_report(traced, tmp_path / "again")] == first


def test_what_is_no_run_is_one_line_and_status_2(tmp_path):
    def said(folder):
        done = CliRunner().invoke(app, ["report", str(folder)])
        assert done.exit_code == 2, done.output
        (line,) = done.stderr.splitlines()
        return line

    assert "no run directory" in said(tmp_path)
    run = write(tmp_path / "run")
    (run / "traces").mkdir()
    (run / "traces" / "t.json").write_text('{"traceEvents": []}')
    assert "no anabranch-trace/1 document; write it with: anabranch trace diff" in said(run)
    (run / "traces" / "t.json").write_text("{")
    assert "not valid JSON" in said(run)

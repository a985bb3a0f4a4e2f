"""`anabranch trace`: what it prints and writes, its exit codes, and a proof on a recording of this engine."""

import csv
import io
import json
import re
from xml.etree import ElementTree

import pytest
from helpers.configs import small_k3
from helpers.nsys_file import NsysFile
from helpers.published_traces import PUBLISHED, decode
from typer.testing import CliRunner

from anabranch.cli.main import app


def run(*words, status=0):
    result = CliRunner().invoke(app, ["trace", *map(str, words)])
    assert result.exit_code == status, result.output
    return result


@pytest.fixture(scope="module")
def arms(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    return [decode(arm, folder / f"{arm}.sqlite") for arm in PUBLISHED]


def test_diff_prints_the_published_changes_and_writes_every_format(arms, tmp_path):
    files = {kind: tmp_path / "new" / f"diff.{kind}" for kind in ("json", "csv", "perfetto", "svg")}
    options = [word for kind, path in files.items() for word in (f"--{kind}", path)]
    out = run("diff", *arms, "--label", "unfused,fused", "--range", "10:11", *options).stdout
    assert "NVIDIA GB300; 3 steps: replays of one graph of 2651 nodes" in out
    assert "3 slices from mla::decode_kernel (found by itself)" in out
    assert re.search(r"^slice, wall +us +1,977\.695 .* 1,951\.731 .* -1\.31 %$", out, re.MULTILINE)
    assert re.search(r"^kernels of a slice +114 +105 +-7\.89 %$", out, re.MULTILINE)
    assert re.search(r"^nvjet_sm103_tst_qkvg +0 +3 +- +351\.697 +\+351\.697$", out, re.MULTILINE)
    assert re.findall(r"^wrote (.*)$", out, re.MULTILINE) == [str(files[k]) for k in ("json", "csv", "perfetto", "svg")]
    _check_document(json.loads(files["json"].read_text()))
    _check_csv(files["csv"].read_text())
    _check_perfetto(json.loads(files["perfetto"].read_text()))
    root = ElementTree.fromstring(files["svg"].read_text())
    boxes = [node for node in root.iter() if node.tag.endswith("rect") and "box" in node.get("class", "")]
    assert len(boxes) == 114 + 105
    assert any("us" in "".join(node.itertext()) for node in root.iter() if node.tag.endswith("text"))


def _check_document(document):
    assert document["format"] == "anabranch-trace/1"
    assert [arm["label"] for arm in document["arms"]] == ["unfused", "fused"]
    assert [sum(len(t["events"]) for t in arm["shown"]["tracks"]) for arm in document["arms"]] == [114, 105]
    assert [len(arm["wall"]) for arm in document["arms"]] == [3, 3]
    assert sum(row["count"][1] for row in document["kernels"]) == 105


def _check_csv(text):
    rows = list(csv.DictReader(io.StringIO(text)))
    assert sum(int(row["unfused_count"]) for row in rows) == 114
    assert sum(float(row["fused_total_us"] or 0) for row in rows) == pytest.approx(2363.971, abs=0.02)
    assert next(row for row in rows if row["kernel"] == "nvjet_beta")["fused_total_us"] == ""


def _check_perfetto(document):
    drawn = [row for row in document["traceEvents"] if row["ph"] == "X"]
    assert [sum(row["pid"] == process for row in drawn) for process in (1, 2)] == [114, 105]
    for process in (1, 2):
        assert min(row["ts"] for row in drawn if row["pid"] == process) == 0
    lanes = {}
    for row in sorted(drawn, key=lambda row: row["ts"]):
        assert row["ts"] >= lanes.get((row["pid"], row["tid"]), 0) - 1e-6
        lanes[row["pid"], row["tid"]] = row["ts"] + row["dur"]
    named = {(row["pid"], row["tid"]) for row in document["traceEvents"] if row["name"] == "thread_name"}
    assert named == set(lanes)


def test_slice_needs_only_a_file(arms):
    out = run("slice", arms[1], "--top", 2).stdout
    assert "69 slices from mla::decode_kernel (found by itself)" in out
    assert "-1.31" not in out
    assert len(out[out.index("kernels of a slice (") :].splitlines()) == 3


def test_count_is_status_1_with_one_line_for_each_wrong_count(arms):
    good = run("count", arms[0], "--expect", "tst_qkv$=207", "--expect", "mla::=72", "--kind", "kernel")
    assert good.stdout.splitlines() == [
        "'tst_qkv$': 207 launches, as expected",
        "'mla::': 72 launches, as expected",
    ]
    bad = run("count", *arms, "--expect", "mla::=144", "--expect", "qkvg=206", status=1)
    assert bad.stdout == "'mla::': 144 launches, as expected\n"
    (line,) = bad.stderr.splitlines()
    assert line.startswith("wrong count: 'qkvg': 207 launches, expected 206 (")
    assert f"{arms[1]} cuda:3 of process 4242 207" in line
    assert run("count", arms[0], "--expect", "mla::").stdout == "'mla::': 72 launches\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--range", "3"), "range='3': need I:J"),
        (("--range", "-1:2"), "need I:J"),
        (("--marker", "absent"), "marker='absent': not in"),
        (("--step", "decode"), "step='decode': no range of that name"),
        (("--device", "0"), "device=0 has no events; there are cuda:3"),
        (("--on", "tpu"), "accepted are auto, gpu, cpu"),
    ],
)
def test_bad_options_are_one_line_and_status_2(arms, words, says):
    for verb in (["slice", arms[0]], ["diff", *arms]):
        result = run(*verb, *words, status=2)
        assert says in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_bad_files_kinds_and_labels_are_one_line_and_status_2(arms, tmp_path):
    file = NsysFile()
    file.whole_graph(0, 900, file.replay(0))
    whole = file.write(tmp_path / "whole.sqlite")
    for words, says in (
        (["slice", whole], "record again with --cuda-graph-trace=node"),
        (["count", tmp_path / "absent", "--expect", "a"], "cannot be read"),
        (["count", arms[0], "--expect", "a=1", "--kind", "graph"], "kind='graph': accepted are kernel"),
        (["diff", *arms, "--label", "one"], "label='one': need two names"),
    ):
        result = run(*words, status=2)
        assert says in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_a_recording_of_this_engine_proves_which_path_ran(tmp_path):
    """torch.profiler on the CPU, one range a path: the counts of GEMMs are those of the paths."""
    config, file = tmp_path / "config.json", tmp_path / "prologue.json"
    config.write_text(json.dumps(small_k3()))
    words = ["bench", "prologue", str(config), "--rows", "3", "--tp", "2", "--device", "cpu", "--trace", str(file)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    gemms = {row["arm"]: row["gemms"] for row in json.loads(done.stdout.splitlines()[-1])["rows"]}
    from anabranch.evidence.trace.load import load_trace
    from anabranch.evidence.trace.steps import find_steps

    made, found = load_trace(file, "cpu"), {}
    for arm in gemms:
        (step,) = find_steps(made, f"^{arm}$").steps
        found[arm] = sum(event.name in ("aten::linear", "aten::matmul", "aten::mm", "aten::bmm") for event in step)
    assert {arm: found[arm] for arm in ("separate", "split", "whole")} == {"separate": 5, "split": 3, "whole": 2}
    assert all(found[arm] == gemms[arm] for arm in ("separate", "split", "whole", "overlap"))

"""Every recording in tests/data/traces is read and cut, and holds what its .expect.json says."""

import json
from pathlib import Path

import pytest

from anabranch.evidence.trace.count import count
from anabranch.evidence.trace.export import document, perfetto
from anabranch.evidence.trace.load import load_trace
from anabranch.evidence.trace.slice import SliceSpec, cut

FOLDER = Path(__file__).parents[1] / "data" / "traces"
EXPECTED = sorted(FOLDER.glob("*.expect.json"))
COMMITTED = {"synthetic_graph", "h200_k3_decode_separate", "h200_k3_decode_whole", "h200_k3_eager_whole"}


def recording(expected):
    name = expected.name.removesuffix(".expect.json")
    found = [path for path in FOLDER.glob(f"{name}.*") if path != expected]
    assert len(found) == 1, f"{name}: {len(found)} recordings beside its .expect.json"
    return found[0]


def test_the_committed_recordings_are_there_and_none_is_unchecked():
    assert {path.name.removesuffix(".expect.json") for path in EXPECTED} >= COMMITTED
    rest = set(FOLDER.iterdir()) - set(EXPECTED) - {recording(path) for path in EXPECTED}
    assert {path.name for path in rest} == {"README.md"}


@pytest.mark.parametrize("expected", EXPECTED, ids=lambda path: path.name.removesuffix(".expect.json"))
def test_a_recording_holds_what_is_expected(expected):
    says = json.loads(expected.read_text())
    assert set(says) <= {"device", "counts", "slice", "step", "on"}
    assert says["counts"], "a recording without a count proves nothing"
    made = load_trace(recording(expected), says.get("on", "auto"))
    assert all(event.took >= 0 for event in made.events)
    assert [e.start for e in made.events] == sorted(e.start for e in made.events)
    if "device" in says:
        assert says["device"] in made.devices.values()
    wrong = [
        c.line() for c in count([made], [f"{name}={number}" for name, number in says["counts"].items()]) if not c.ok
    ]
    assert not wrong
    if "slice" in says:
        wanted = says["slice"]
        (piece,) = cut([made.on()], SliceSpec(marker=wanted.get("marker"), until=wanted.get("until")), says.get("step"))
        assert len(piece.representative.events) == wanted["launches"]
        assert piece.representative.wall > 0
        shown = document([piece], ["it"])["arms"][0]["shown"]["tracks"]
        assert sum(len(track["events"]) for track in shown) == wanted["launches"]
        drawn = [row for row in perfetto([piece], ["it"])["traceEvents"] if row["ph"] == "X"]
        assert len(drawn) == wanted["launches"]


def test_the_synthetic_graph_overlaps_on_two_streams():
    made = load_trace(FOLDER / "synthetic_graph.json").on()
    assert {event.node for event in made.events if event.kind == "kernel"} == set(range(1, 9))
    (piece,) = cut([made], SliceSpec(marker="rms_norm"))
    assert (len(piece.steps), len(piece.slices)) == (2, 2)
    assert [(s.wall, s.overlap, s.streams, s.nodes) for s in piece.slices] == [(40_000, 9_500, 2, 4)] * 2

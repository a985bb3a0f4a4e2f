"""Slices: where they begin and end, what they measure, and that others' published figures come out of them."""

import re
from itertools import pairwise

import pytest
from helpers.nsys_file import NsysFile
from helpers.published_traces import PUBLISHED, decode, prefill
from hypothesis import given
from hypothesis import strategies as st

from anabranch.evidence.trace.count import count, parse_expected
from anabranch.evidence.trace.events import Event, Place, Trace
from anabranch.evidence.trace.export import lanes
from anabranch.evidence.trace.load import load_trace
from anabranch.evidence.trace.slice import SliceSpec, cut, union
from anabranch.evidence.trace.steps import find_steps
from anabranch.evidence.trace.table import kernel_rows, measures

HERE = Place(0, 0)


def event(name, start, took, stream=7, **keys):
    return Event(name=name, kind="kernel", start=start, end=start + took, place=HERE, stream=stream, **keys)


def trace(*events):
    return Trace(source="made", format="nsys", events=sorted(events, key=lambda e: e.start))


@pytest.fixture(scope="module")
def arms(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    return [load_trace(decode(arm, folder / f"{arm}.sqlite")).on() for arm in PUBLISHED]


def figures(cuts):
    return {measure.name: measure for measure in measures(cuts)}


def test_the_published_four_layer_slice_comes_out(arms):
    cuts = cut(arms, SliceSpec(first=10, last=11))
    assert [c.found for c in cuts] == [True, True]
    assert cuts[0].marker.startswith("void mla::decode_kernel")
    found = figures(cuts)
    wall, summed, graph = found["slice, wall"], found["slice, summed"], found["whole step, wall"]
    assert [s.median for s in wall.arms] == [1_977_695, 1_951_731]
    assert wall.change_pct == pytest.approx(-1.31, abs=0.005)
    assert [s.median for s in summed.arms] == [2_190_766, 2_363_971]
    assert [s.median for s in found["kernels of a slice"].arms] == [114, 105]
    assert found["kernels of a slice"].change_pct == pytest.approx(-7.89, abs=0.005)
    assert [s.median for s in found["graph nodes of a step"].arms] == [2651, 2444]
    assert [s.median for s in graph.arms] == [45_262_000, 44_807_000]
    assert graph.change_pct == pytest.approx(-1.00, abs=0.01)
    # the sum grows while the wall shrinks: the difference is overlap
    assert [s.median for s in found["slice, overlap"].arms] == [213_071, 412_240]
    # over the three replays, one of which is the median
    assert (wall.arms[0].count, wall.arms[0].low, wall.arms[0].high) == (3, 1_977_095, 1_978_595)
    assert [c.representative.step for c in cuts] == [1, 1]


def test_the_published_prologue_comes_out(arms):
    cuts = cut(arms, SliceSpec(marker="tst_qkv", until="causal_conv", first=30, last=33))
    found = figures(cuts)
    one, three = found["slice, wall"], found["slices of a step together, wall"]
    assert [s.median for s in one.arms] == [140_064, 117_281]
    assert one.change_pct == pytest.approx(-16.27, abs=0.005)
    assert [s.median for s in three.arms] == [420_304, 351_697]
    assert three.change_pct == pytest.approx(-16.32, abs=0.005)


def test_without_a_range_every_period_of_every_replay_is_a_slice(arms):
    cuts = cut(arms, SliceSpec())
    assert [len(c.slices) for c in cuts] == [3 * 23, 3 * 23]
    rows = {row.name: row for row in kernel_rows(cuts)}
    assert rows["nvjet_sm103_tst_qkvg"].count == (0, 3)
    assert rows["nvjet_sm103_tst_qkvg"].total[0] is None
    assert rows["nvjet_beta"].count == (3, 0)
    assert rows["nvjet_f_b"].count == (3, 3)
    assert sum(row.count[0] for row in rows.values()) == 114
    ordered = [abs(row.change) for row in kernel_rows(cuts)]
    assert ordered == sorted(ordered, reverse=True)


def test_1104_copies_become_276_packs_on_eight_devices(tmp_path):
    before, after = (load_trace(prefill(arm, tmp_path / f"{arm}.sqlite")) for arm in ("copies", "packed"))
    assert len(before.places()) == len(after.places()) == 8
    assert all(c.ok for c in count([before], ["input_copy=1104", "pack_inputs=0", "kda_prefill=276"]))
    assert all(c.ok for c in count([after], ["input_copy=0", "pack_inputs=276", "kda_prefill=276"]))
    (wrong,) = count([after], ["pack_inputs=275"])
    assert not wrong.ok
    assert "276 launches, expected 275" in wrong.line()
    assert len(wrong.places) == 8
    assert count([before, after], ["kda_prefill=552"])[0].ok


@pytest.mark.parametrize(
    ("text", "means"),
    [("pack=276", ("pack", 276)), ("pack", ("pack", None)), ("a=b=0", ("a=b", 0)), ("tile=<x>", ("tile=<x>", None))],
)
def test_what_is_expected(text, means):
    assert parse_expected(text) == means


def test_a_count_may_be_of_one_kind(tmp_path):
    file = NsysFile()
    file.kernel("copy_kernel", 0, 5)
    file.copy(10, 5)
    made = load_trace(file.write(tmp_path / "t.sqlite"))
    assert count([made], ["(?i)cop|cpy"])[0].found == 2
    assert count([made], ["(?i)cop|cpy=1"], ["memcpy"])[0].ok
    with pytest.raises(ValueError, match="not a regular expression"):
        count([made], ["a(=1"])
    with pytest.raises(ValueError, match="needs a pattern"):
        count([made], ["=1"])


def test_wall_sum_overlap_and_idle_of_a_slice():
    events = trace(
        event("open", 100, 10), event("side", 105, 30, stream=13), event("main", 112, 8), event("late", 140, 30, 13),
        event("open", 150, 10),
    )  # fmt: skip
    (only,) = cut([events], SliceSpec(marker="open"))
    (piece,) = only.slices
    assert [e.name for e in piece.events] == ["open", "side", "main", "late"]
    assert (piece.wall, piece.summed, piece.streams) == (50, 78, 2)
    assert piece.overlap == 5 + 8  # of open and side, of main and side
    assert piece.idle == 5  # 135 to 140; what reaches past the end covers no more than the slice


def test_a_slice_may_open_after_its_marker_and_close_at_the_end_of_the_step():
    events = trace(event("m", 0, 10), event("a", 5, 2, 13), event("b", 10, 5), event("m", 20, 10), event("c", 30, 7))
    (after,) = cut([events], SliceSpec(marker="m", first=0, last=1, after=True))
    assert [(s.start, s.end, [e.name for e in s.events]) for s in after.slices] == [(10, 20, ["b"])]
    (last,) = cut([events], SliceSpec(marker="m", first=1, last=2))
    assert [(s.start, s.end, [e.name for e in s.events]) for s in last.slices] == [(20, 37, ["m", "c"])]
    (alone,) = cut([events], SliceSpec(marker="c"))
    assert [(s.start, s.end) for s in alone.slices] == [(30, 37)]


def test_slices_with_other_launches_are_left_out_and_that_is_said():
    events = [event(name, 10 * i, 5) for i, name in enumerate("mabmabmacmabm")]
    (made,) = cut([trace(*events)], SliceSpec(marker="m"))
    assert [s.index for s in made.slices] == [0, 1, 3]
    assert "1 of 4 slices hold other launches and are left out" in made.notes


def test_the_representative_is_nearest_the_median_and_the_earlier_of_two():
    gaps, at, events = [10, 40, 20, 24, 90], 0, []
    for gap in gaps:
        events.append(event("m", at, 5))
        at += gap
    (made,) = cut([trace(*events, event("m", at, 5))], SliceSpec(marker="m"))
    assert made.representative.wall == 24
    (even,) = cut([trace(*events)], SliceSpec(marker="m"))  # walls 10, 40, 20, 24: median 22
    assert even.representative.wall == 20


def test_steps_are_replays_of_the_graph_that_took_the_most_time():
    events = [event("warm", 0, 50)]
    for number in range(3):
        base = 1000 * number
        events += [
            event("x", base + 100, 10, launch=number, graph=True),
            event("y", base + 110, 10, launch=number, graph=True),
        ]
    for number in range(5):  # more replays, less time
        events += [event("z", 9000 + 10 * number + i, 1, launch=90 + number, graph=True) for i in range(4)]
    steps = find_steps(trace(*events))
    assert [len(step) for step in steps.steps] == [2, 2, 2]
    assert steps.how == "replays of one graph of 2 nodes"
    assert steps.notes == ("5 replays of 1 other graphs are left out", "1 launches outside graphs are left out")


def test_steps_may_be_ranges_in_which_the_host_launched(tmp_path):
    file = NsysFile()
    for number in range(3):
        base = 1_000_000 * (number + 1)
        file.range(f"step {number}", base, 400_000)
        file.range("inner", base + 1000, 300_000)
        for place in range(4):  # the device runs them long after the range on the host has ended
            launch = file.call("cudaLaunchKernel_v7000", base + 10_000 * (place + 1), 3000)
            file.kernel("m" if place % 2 == 0 else "k", base + 500_000 + 1000 * place, 700, launch=launch)
    stray = file.call("cudaLaunchKernel_v7000", 1_050_000, 3000, thread=31)  # inside, but of another thread
    file.kernel("stray", 4_800_000, 10, launch=stray)
    made = load_trace(file.write(tmp_path / "t.sqlite"))
    steps = find_steps(made, "^step")
    assert [[e.name for e in step] for step in steps.steps] == [["m", "k", "m", "k"]] * 3
    assert steps.notes == ("1 of 13 launches lie outside the steps",)
    (cuts,) = cut([made.on()], SliceSpec(marker="m", first=0, last=2), "^step")
    assert len(cuts.slices) == 3
    with pytest.raises(ValueError, match=r"step='decode': no range of that name .* there are inner, step 0, step 1"):
        find_steps(made, "decode")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (SliceSpec(marker="absent"), "marker='absent': not in made; its commonest launches are 'm', 'a'"),
        (SliceSpec(marker="m", first=1, last=9), "range=1:9: a step has 3 markers, accepted is 0 <= I < J <= 3"),
        (SliceSpec(marker="m", first=2, last=2), "range=2:2"),
        (SliceSpec(marker="m", first=2), "needs both ends"),
        (SliceSpec(marker="m", until="absent"), "no slice between 'm' and 'absent'"),
        (SliceSpec(marker="m("), "not a regular expression"),
    ],
)
def test_a_slice_that_cannot_be_cut_is_refused_in_one_line(spec, says):
    events = trace(*(event(name, 10 * i, 5) for i, name in enumerate("mamam")))
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        cut([events], spec)
    assert "\n" not in str(error.value)


def test_no_marker_is_found_where_nothing_repeats():
    with pytest.raises(ValueError, match="name one with --marker"):
        cut([trace(*(event(name, 10 * i, 5) for i, name in enumerate("abcde")))], SliceSpec())


def test_the_marker_is_what_repeats_over_most_of_the_step_and_not_what_repeats_most_alike():
    # three KDA layers and one MLA layer, four times; then a tail in which one kernel follows itself
    text = "MaKbKbKb" * 4 + "M" + "t" * 5
    (made,) = cut([trace(*(event(name, 10 * i, 5) for i, name in enumerate(text)))], SliceSpec())
    assert (made.marker, len(made.slices)) == ("M", 4)


def test_a_marker_must_be_as_frequent_in_both_arms():
    both = [trace(*(event(name, 10 * i, 5) for i, name in enumerate(text))) for text in ("mxxmxxmxxm", "mxmxmxm")]
    assert {c.marker for c in cut(both, SliceSpec())} == {"m"}


SPANS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 60)), max_size=40)


@given(SPANS)
def test_union_counts_every_covered_nanosecond_once(spans):
    covered = {moment for start, took in spans for moment in range(start, start + took)}
    assert union((start, start + took) for start, took in spans) == len(covered)


@given(SPANS.filter(bool))
def test_no_two_events_of_a_lane_overlap_and_no_lane_is_spare(spans):
    placed = lanes(event("k", start, took) for start, took in spans)
    assert len(placed) == len(spans)
    for lane in {lane for _, lane in placed}:
        here = sorted((e.start, e.end) for e, number in placed if number == lane)
        assert all(a[1] <= b[0] for a, b in pairwise(here))
    deepest = max(sum(s <= moment < s + t for s, t in spans) for moment in {s for s, _ in spans})
    if all(took for _, took in spans):
        assert 1 + max(lane for _, lane in placed) == deepest

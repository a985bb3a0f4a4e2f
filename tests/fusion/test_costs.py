"""Measured times as choices: never slower than the default beyond noise, no flip-flop; bad tables are one line."""

import json

import pytest
from helpers.oracle import model_config
from helpers.ref_tiny import kimi_k3_tiny, kimi_linear_tiny
from hypothesis import given
from hypothesis import strategies as st

from anabranch.config.fusion import FusionConfig
from anabranch.config.parallel import ParallelConfig
from anabranch.fusion.costs import FORMAT, Cell, Costs, Times, bucket, join_tables, read_table, shape_key
from anabranch.fusion.plan import EAGER, Moment, explain, make_plan

K3, KL = model_config(kimi_k3_tiny()), model_config(kimi_linear_tiny())
ONE = ParallelConfig()


def cell(rows: int, context: int = 512, *, graph=True, kind="kda", shape="s", deterministic=False) -> Cell:
    return Cell(kind=kind, shape=shape, graph=graph, deterministic=deterministic, rows=rows, context=context)


def costs(times: dict, default="a", legal=("a", "b", "c"), spread=1.0) -> Costs:
    """`times`: (rows, context) or rows -> {path: us}."""
    cells = {cell(*(k if isinstance(k, tuple) else (k,))): Times(us=v, spread_us=spread) for k, v in times.items()}
    return Costs(cells, default, legal)


def test_a_path_replaces_the_default_only_by_more_than_the_spread():
    assert costs({1: {"a": 10.0, "b": 9.1}}).pick(1, 1, 1, True) == "a"
    assert costs({1: {"a": 10.0, "b": 8.9}}).pick(1, 1, 1, True) == "b"
    assert costs({1: {"a": 10.0, "b": 8.0, "c": 7.9}}).pick(1, 1, 1, True) == "c"


def test_neighbouring_rows_do_not_flip_by_noise():
    table = costs(
        {1: {"a": 10.0, "b": 5.0}, 4: {"a": 10.0, "b": 10.8}, 8: {"a": 10.0, "b": 9.9}, 16: {"a": 9, "b": 11}}
    )
    assert [table.pick(m, 1, 1, True) for m in (1, 4, 8, 16)] == ["b", "b", "b", "a"]
    assert table.summary() == "in graphs b to M=8, then a"
    assert table.paths == ("a", "b")


def test_rows_and_contexts_between_the_measured_ones_take_the_next_larger():
    table = costs({(4, 512): {"a": 1, "b": 9}, (4, 4096): {"a": 9, "b": 1}, (8, 512): {"a": 9.0, "c": 1.0}})
    picks = {(m, c): table.pick(m, c, c, True) for m in (1, 4, 5, 8, 900) for c in (1, 512, 513, 10**6)}
    assert picks[1, 1] == picks[4, 512] == "a"
    assert picks[1, 513] == picks[4, 10**6] == "b"
    # at 8 rows only the short context was measured
    assert {picks[m, c] for m in (5, 8, 900) for c in (1, 513, 10**6)} == {"c"}
    assert [bucket([1, 8], v) for v in (1, 2, 8, 9)] == [1, 8, 8, 8]


def test_one_choice_for_many_contexts_loses_least_at_the_worst_of_them():
    table = costs(
        {(1, c): us for c, us in {512: {"a": 10, "b": 4}, 4096: {"a": 20, "b": 19}, 32768: {"a": 30, "b": 33}}.items()}
    )
    assert [table.pick(1, c, c, True) for c in (512, 4096, 32768)] == ["b", "a", "a"]
    assert table.pick(1, 1, 32768, True) == "b"  # loses 3 at most, the default 6
    assert table.pick(1, 4096, 32768, True) == "a"


def test_without_the_mode_or_the_default_there_is_nothing_to_go_by():
    table = costs({1: {"a": 10.0, "b": 1.0}})
    assert table.pick(1, 1, 1, False) == "a"
    assert not costs({1: {"b": 1.0}})
    assert costs({1: {"b": 1.0}}).pick(1, 1, 1, True) == "a"
    assert costs({1: {"a": 10.0, "b": 1.0}}, legal=("a",)).pick(1, 1, 1, True) == "a"


def test_lengths_that_grow_by_one_do_not_grow_the_memory():
    table = costs({(1, 512): {"a": 1.0}, (1, 4096): {"a": 1.0}})
    for n in range(1, 9000, 7):
        table.pick(1, n, n, True)
    assert len(table._taken) <= 3


PATHS = ("a", "b", "c")
us = st.floats(1, 100)
grids = st.dictionaries(
    st.tuples(st.sampled_from([1, 4, 16, 64]), st.sampled_from([512, 4096, 32768])),
    st.tuples(st.fixed_dictionaries(dict.fromkeys(PATHS, us)), st.floats(0, 5)),
    min_size=1,
)


@given(grids, st.integers(1, 100), st.integers(1, 40000))
def test_no_choice_loses_more_than_the_spread(grid, rows, context):
    """Check 2 of the edge cases: the planner never loses to the default by more than noise, at any M and context."""
    cells = {cell(m, c): Times(us=times, spread_us=spread) for (m, c), (times, spread) in grid.items()}
    table = Costs(cells, "a", PATHS)
    path = table.pick(rows, context, context, True)
    m = bucket(sorted({m for m, _ in grid}), rows)
    c = bucket(sorted(c for n, c in grid if n == m), context)
    times, spread = grid[m, c]
    assert times[path] <= min(times.values()) + spread
    assert table.pick(rows, context, context, True) == path


@given(grids, st.integers(1, 100))
def test_a_frozen_choice_is_the_best_of_worst_cases(grid, rows):
    cells = {cell(m, c): Times(us=times, spread_us=spread) for (m, c), (times, spread) in grid.items()}
    path = Costs(cells, "a", PATHS).pick(rows, 1, 10**6, True)
    m = bucket(sorted({m for m, _ in grid}), rows)
    met = [grid[n, c] for n, c in grid if n == m]
    worst = {p: max(times[p] - min(times.values()) for times, _ in met) for p in PATHS}
    assert worst[path] <= min(worst.values()) + max(spread for _, spread in met)


def table_file(tmp_path, cells: list[dict], device="cpu", name="t.json"):
    file = tmp_path / name
    file.write_text(json.dumps({"format": FORMAT, "device": device, "runs": [{}], "cells": cells}))
    return file


def raw(config, kind, rows, us, *, context=512, graph=False, deterministic=False, spread=0.1):
    shape = shape_key(config, kind, 1, "float32")
    return {
        "kind": kind, "shape": shape, "graph": graph, "deterministic": deterministic, "rows": rows,
        "context": context, "us": us, "spread_us": spread,
    }  # fmt: skip


def test_auto_follows_the_table_and_a_wish_wins(tmp_path):
    cells = [raw(K3, "kda", 1, {"whole": 9, "overlap": 5}), raw(K3, "kda", 64, {"whole": 5, "overlap": 9})]
    fusion = FusionConfig(table=str(table_file(tmp_path, cells)))
    plan = make_plan(K3, fusion, "float32", parallel=ONE)
    assert [plan.kda.pick(m, EAGER) for m in (1, 2, 64, 999)] == ["overlap", "whole", "whole", "whole"]
    assert plan.kda.pick(1, Moment(1, 99, True)) == "whole"  # graphs were not measured
    assert plan.kda.reason == "auto, measured on cpu: eager overlap to M=1, then whole"
    assert (plan.mla.path, plan.mla.costs) == ("merged", None)
    assert "no measured times for cpu and this shape" in plan.mla.reason
    asked = make_plan(K3, FusionConfig(kda="split", table=fusion.table), "float32", parallel=ONE)
    assert (asked.kda.pick(1, EAGER), asked.kda.reason) == ("split", "asked for")
    meta = make_plan(K3, fusion, "float32", parallel=ONE, device="meta")
    assert meta.kda.paths == ("whole", "overlap")


def test_a_table_of_another_device_shape_or_mode_is_refused(tmp_path):
    other = FusionConfig(table=str(table_file(tmp_path, [raw(K3, "kda", 1, {"whole": 1})], device="NVIDIA H200")))
    mine = FusionConfig(table=str(table_file(tmp_path, [raw(K3, "kda", 1, {"whole": 1})], name="u.json")))
    for config, fusion, deterministic in ((K3, other, False), (KL, mine, False), (K3, mine, True)):
        with pytest.raises(ValueError, match=r"cost table .*: nothing about cpu, this model's shapes and \w+ mode"):
            make_plan(config, fusion, "float32", parallel=ONE, deterministic=deterministic)
    # where nothing is left to choose nothing has to be known
    make_plan(K3, FusionConfig(kda="split", mla="merged", table=other.table), "float32", parallel=ONE)
    # planning for another machine takes that machine's table
    planned = make_plan(K3, other, "float32", parallel=ONE, device="meta")
    assert "measured on NVIDIA H200" in planned.kda.reason


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "format 'list', accepted is 'anabranch-costs/1'"),
        ('{"format": "x"}', "format 'x', accepted is 'anabranch-costs/1'"),
        ('{"format": "anabranch-costs/1"}', "KeyError 'cells'"),
        ('{"format": "anabranch-costs/1", "cells": [{}]}', "KeyError 'kind'"),
    ],
)
def test_a_broken_table_is_one_line(tmp_path, text, message):
    file = tmp_path / "t.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="cost table") as caught:
        read_table(file)
    assert message in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_missing_table_and_a_cell_without_time(tmp_path):
    with pytest.raises(ValueError, match=r"cost table .*nowhere\.json: No such file"):
        read_table(tmp_path / "nowhere.json")
    with pytest.raises(ValueError, match=r"a cell with rows=1, context=512, us=\{'a': 0\.0\}"):
        read_table(table_file(tmp_path, [raw(K3, "kda", 1, {"a": 0})]))


def test_tables_of_one_device_are_one():
    a = {cell(1): Times(us={"a": 1.0}, spread_us=0)}
    b = {cell(4): Times(us={"a": 2.0}, spread_us=0)}
    from anabranch.fusion.costs import CostTable

    tables = [CostTable(device="x", runs=({},), cells=c, source=s) for c, s in ((a, "1"), (b, "2"))]
    joined = join_tables([*tables, CostTable(device="y", runs=(), cells={}, source="3")], "x")
    assert joined is not None
    assert (joined.cells, joined.source, len(joined.runs)) == (a | b, "1, 2", 2)
    assert join_tables(tables, "z") is None


def test_shapes_are_told_apart_and_layouts_with_equal_ranks_are_not():
    keys = {shape_key(c, k, tp, d) for c in (K3, KL) for k in ("kda", "mla") for tp in (1, 2) for d in ("float32", "x")}
    assert len(keys) == 16


def test_explain_says_what_the_plan_does(tmp_path):
    cells = [raw(K3, "mla", 1, {"merged": 9, "overlap": 5}, context=c, graph=True) for c in (512, 4096)]
    fusion = FusionConfig(table=str(table_file(tmp_path, cells, device="NVIDIA H200")))
    [found] = explain(K3, fusion, "float32", ONE)
    assert (found.device, found.deterministic, found.choice.kind) == ("NVIDIA H200", False, "mla")
    decisions = list(found.choice.costs.decisions())
    assert [(d.context, d.path) for d in decisions] == [(None, "overlap"), (512, "overlap"), (4096, "overlap")]
    assert decisions[0].us == {"merged": 4.0, "overlap": 0.0}
    assert not list(explain(KL, fusion, "float32", ONE))


def test_shipped_tables_can_be_read():
    from anabranch.fusion.costs import shipped_tables

    for table in shipped_tables():
        assert table.cells
        assert all(run["commit"] for run in table.runs)

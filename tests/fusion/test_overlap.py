"""Overlap paths inside layers and the engine: the gate is handed over, joined once, dropped on errors, chosen by M."""

import json

import pytest
import torch
from helpers.oracle import Session, engine_model, model_config
from helpers.ref_tiny import kimi_k3_tiny, random_weights
from helpers.streams import FakeStreams

from anabranch.config.fusion import FusionConfig
from anabranch.engine.cache import Cache, CacheShape
from anabranch.engine.engine import Engine
from anabranch.engine.graphs import DecodeGraphs
from anabranch.engine.request import Request
from anabranch.engine.runner import Runner
from anabranch.engine.sampling import SamplingParams
from anabranch.engine.text import TextStream
from anabranch.fusion import counters
from anabranch.fusion.costs import FORMAT, shape_key
from anabranch.fusion.fork import Fork
from anabranch.fusion.plan import Moment

TINY = kimi_k3_tiny(layers=5, kda_layers=(1, 2, 3), full_layers=(4, 5))
BOTH = FusionConfig(kda="overlap", mla="overlap")


@pytest.fixture
def model():
    return engine_model(TINY, random_weights(TINY, 3), BOTH)


def faked(model):
    """The model's one branch on recording streams; its weights and GEMMs stay on the CPU."""
    streams = FakeStreams()
    branch = layers(model)[0].prologue.weights.branch
    branch._streams_of = lambda device: streams
    return branch, streams


def layers(model):
    return [layer.self_attn for layer in model.model.layers.values()]


def test_all_layers_fork_from_one_branch(model):
    assert len({id(layer.prologue.weights.branch) for layer in layers(model)}) == 1


def test_a_pass_forks_once_a_layer_and_leaves_nothing_out(model):
    branch, streams = faked(model)
    with counters.counting() as ran:
        Session(model).step((0, list(range(9))))
    assert (ran["fork.side"], ran["kda.overlap"], ran["mla.overlap"], branch.open) == (5, 3, 2, 0)
    assert set(streams.known) == {"main", "side"}
    # mark, side waits, side done, main waits: nothing else reaches the streams
    assert [entry[:2] for entry in streams.log] == [
        ("record", "main"), ("wait", "side"), ("record", "side"), ("wait", "main"),
    ] * 5  # fmt: skip
    assert len(streams.lent) == 3 * 2 + 2


def test_the_gate_joins_behind_the_attention(model, monkeypatch):
    """Main work is recorded first: the gate's GEMM is called after the attention, though its mark lies before."""
    _, streams = faked(model)
    layer = next(attn for attn in layers(model) if attn.prologue.kind == "mla")
    order = []
    attend, gemm = layer._attend, type(layer.prologue.weights).gemm
    monkeypatch.setattr(layer, "_attend", lambda *a: (order.append("attention"), attend(*a))[1])

    def spied(self, x, weight):
        order.append(f"gemm on {streams.current}")
        return gemm(self, x, weight)

    monkeypatch.setattr(type(layer.prologue.weights), "gemm", spied)
    Session(model).step((0, [1, 2, 3]))
    assert order[:3] == ["gemm on main", "attention", "gemm on side"]


@pytest.mark.parametrize("where", ["_write", "_attend"])
def test_an_error_in_the_attention_drops_the_gate(model, monkeypatch, where):
    branch, streams = faked(model)

    def fail(*args):
        raise ValueError("attention")

    layer = next(attn for attn in layers(model) if attn.prologue.kind == "mla")
    with monkeypatch.context() as patched:
        patched.setattr(layer, where, fail)
        with counters.counting() as ran, pytest.raises(ValueError, match="attention"):
            Session(model).step((0, [1, 2, 3]))
    assert (branch.open, ran["fork.skipped"], streams.unjoined()) == (0, 1, frozenset())
    with counters.counting() as ran:
        Session(model).step((0, [1, 2, 3]))  # the next pass knows nothing of it
    assert (ran["fork.side"], ran["fork.skipped"]) == (5, 0)


def test_nothing_is_kept_on_a_module(model):
    Session(model).step((0, [1, 2, 3]))
    for module in model.modules():
        held = vars(module).values()
        assert not [v for v in held if isinstance(v, Fork)]
        assert not [v for v in held if isinstance(v, torch.Tensor) and not isinstance(v, torch.nn.Parameter)]


def test_in_a_breakable_segment_the_gate_joins_before_the_boundary(model, monkeypatch):
    branch, streams = faked(model)
    layer = next(attn for attn in layers(model) if attn.prologue.kind == "mla")
    attend = layer._attend

    def broken(*args):
        branch.boundary()  # a segment of the graph ends, attention runs eagerly, another begins
        streams.graph = False
        out = attend(*args)
        streams.graph = True
        return out

    want = Session(model).step((0, [5, 6, 7]))
    monkeypatch.setattr(layer, "_attend", broken)
    streams.graph = True
    with counters.counting() as ran:
        got = Session(model).step((0, [5, 6, 7]))
    assert ran["fork.boundary"] == 1
    assert torch.equal(got[0], want[0])


def cost_table(tmp_path, config):
    """Eager: MLA overlaps from 64 tokens of context up, KDA below 4 rows. Graphs: overlap everywhere."""
    cells = []
    for kind, default in (("kda", "whole"), ("mla", "merged")):
        for rows in (1, 4):
            for context in (63, 512):
                wins = rows < 4 if kind == "kda" else context > 63
                for graph in (False, True):
                    us = {default: 10.0, "overlap": 5.0 if wins or graph else 15.0}
                    where = {"kind": kind, "shape": shape_key(config, kind, 1, "float32"), "graph": graph}
                    where |= {"deterministic": False, "rows": rows, "context": context}
                    cells.append(where | {"us": us, "spread_us": 0.5})
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"format": FORMAT, "device": "cpu", "runs": [], "cells": cells}))
    return FusionConfig(table=str(file))


def test_the_engine_chooses_by_rows_and_context(tmp_path):
    config = model_config(TINY)
    model = engine_model(TINY, random_weights(TINY, 3), cost_table(tmp_path, config))
    shape = CacheShape.of(config, model.parallel, torch.float32)
    cache = Cache(config, model.parallel, shape, slots=8, pages=60, device="cpu")
    engine = Engine(Runner(model, cache), (), 1024, 2048, prefix_cache=False)

    def generate(*prompts):
        for i, tokens in enumerate(prompts):
            params = SamplingParams(temperature=0.0, max_tokens=3)
            engine.add(Request(id=i, prompt=[7] * tokens, params=params, text=TextStream(None)))
        with counters.counting() as ran:
            while engine.busy:
                engine.step()
        return {k: n for k, n in ran.items() if k[4:] in ("whole", "merged", "overlap")}

    # one prompt of 60 tokens is 60 rows; its two further tokens are one row each, at contexts 61 and 62
    assert generate(60) == {"kda.whole": 3, "mla.merged": 6, "kda.overlap": 6}
    assert generate(62) == {"kda.whole": 3, "mla.merged": 4, "kda.overlap": 6, "mla.overlap": 2}
    assert generate(100) == {"kda.whole": 3, "mla.overlap": 6, "kda.overlap": 6}
    # five decodes are five rows; the longest context counts for all
    assert generate(5, 5, 5, 5, 100) == {"kda.whole": 9, "mla.overlap": 6}


def test_a_graph_asks_for_every_context_that_it_may_meet(model, monkeypatch):
    monkeypatch.setattr(torch, "zeros", lambda *a, pin_memory=False, zeros=torch.zeros, **k: zeros(*a, **k))
    config = model.config
    cache = Cache(
        config, model.parallel, CacheShape.of(config, model.parallel, torch.float32), slots=2, pages=9, device="cpu"
    )
    graphs = DecodeGraphs(model, cache, torch.device("cpu"), [1, 2], 512)
    assert graphs._batch(graphs._host([], 2, graphs.width)).moment == Moment(1, 512, True)

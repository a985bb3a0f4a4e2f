"""Slices and whole steps as they are timed on a GPU: launches of each path by number, graphs of two arms in turn."""

import json
import random

import pytest
import torch
from helpers.configs import kimi_k3

from anabranch.config.hf import parse_model_config
from anabranch.engine.llm import LLM
from anabranch.measure import slice_times
from anabranch.measure.decode_step import bench_decode
from anabranch.measure.path_arms import all_arms
from anabranch.measure.prefill import bench_prefill
from anabranch.measure.simulated_peers import LinkModel
from anabranch.measure.slice import Slice
from anabranch.measure.step_paths import StepPaths
from anabranch.parallel.layout import Layout

DEVICE = torch.device("cuda")
# launches fewer than `split` in a KDA layer; small products of `separate` may be two launches each of a library
FEWER = {"split": 0, "overlap": 0, "whole": 1, "fused": 2, "deferred": 2}


def eight_layers(**changes):
    """Kimi-K3 at the attention widths of one of eight ranks, with few experts and a short vocabulary."""
    kinds = kimi_k3()["text_config"]["linear_attn_config"]
    kinds |= {"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7], "num_heads": 12}
    small = {"num_hidden_layers": 8, "num_attention_heads": 12, "num_experts": 32, "moe_intermediate_size": 384}
    small |= {"intermediate_size": 512, "vocab_size": 4096, "attn_res_block_size": 3, "linear_attn_config": kinds}
    return kimi_k3(**(small | changes))


@pytest.mark.usefixtures("unpoisoned")
def test_each_path_of_a_slice_has_its_number_of_launches(monkeypatch, tmp_path):
    for name, value in (("ROUNDS", 1), ("SAMPLES", 2)):
        monkeypatch.setattr(slice_times, name, value)
    config = parse_model_config(eight_layers())
    with torch.inference_mode():
        subject = Slice(config, Layout(), device=DEVICE, dtype=torch.bfloat16, rows=8, context=300)
        names = all_arms(subject.config, subject.model.plan)
        result = slice_times.time_slice(subject, names, LinkModel(), tmp_path)
    rows = {row["arm"]: row for row in result.rows()}
    assert list(rows) == names
    base = rows["split"]["kernels_per_slice"]
    assert rows["separate"]["kernels_per_slice"] >= base + 3 * 2
    for name, row in rows.items():
        kda, _, mla = name.partition("+")
        if kda != "separate":
            assert row["kernels_per_slice"] == base - 3 * FEWER[kda] - (mla == "merged"), name
        assert 0 < row["profile"]["busy_us"] <= row["profile"]["sum_us"] + 0.01
        assert row["us_median"] > row["floor_us"] * 0.5
        assert "traceEvents" in json.loads((tmp_path / f"{name}.json").read_text())


@pytest.mark.usefixtures("unpoisoned")
@pytest.mark.parametrize("layout", [Layout(tp=4, dp_attention=4, ep=4), Layout(tp=4)], ids=str)
def test_a_rank_of_several_is_captured_alone(monkeypatch, layout):
    for name, value in (("ROUNDS", 1), ("SAMPLES", 2)):
        monkeypatch.setattr(slice_times, name, value)
    config = parse_model_config(eight_layers())
    with torch.inference_mode():
        subject = Slice(config, layout, device=DEVICE, dtype=torch.bfloat16, rows=16, context=130)
        result = slice_times.time_slice(subject, ["split", "fused"], LinkModel())
    split, fused = result.rows()
    assert split["kernels_per_slice"] - fused["kernels_per_slice"] == 3 * FEWER["fused"]
    # placing own rows among those of other replicas: one copy a layer
    assert split["profile"]["copies"] >= (4 if layout.dp_attention > 1 else 0)


def test_a_step_is_recorded_and_two_arms_take_turns(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(eight_layers()))
    llm = LLM(tmp_path, load_format="dummy", max_seqs=4, max_len=512, prefill_chunk=256, prefix_cache=False,
              graph_sizes=[4])  # fmt: skip
    rng, own = random.Random(0), llm.engine.runner.graphs
    result = bench_decode(llm, 4, tokens_in=40, tokens_out=24, repeats=1, rng=rng)
    assert result.launches is not None
    assert result.launches.kernels == int(result.launches.kernels)
    assert 0.2 < result.busy_share < 1.2
    assert result.touched.experts_mean > 16
    prompt = bench_prefill(llm, 200, repeats=1, profile=True, rng=rng)
    assert prompt.launches is not None
    arms = StepPaths(llm, ["separate", "fused"])
    before = llm.engine.runner.graph_replays[4]
    paths = arms.bench(4, tokens_in=40, tokens_out=50, repeats=2, rng=rng)
    assert llm.engine.runner.graph_replays[4] > before
    assert llm.engine.runner.graphs is own
    assert [len(turns) for turns in paths.turns.values()] == [4, 4]
    assert paths.ran["separate"].keys() == {"kda.separate", "mla.separate"}
    assert paths.ran["fused"].keys() == {"kda.fused", "mla.separate"}

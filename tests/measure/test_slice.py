"""A rank's four-layer slice on a CPU: real layers, simulated peers, every arm's path, exact bytes, red gates.

Times mean nothing here.
"""

import json
from dataclasses import replace

import pytest
import torch

from anabranch.config.hf import parse_model_config
from anabranch.config.model import ActivationConfig
from anabranch.fusion import counters
from anabranch.fusion.kda_paths import KDA_FULL_RANK
from anabranch.layers.residual import Stream
from anabranch.measure import slice_times
from anabranch.measure.gate import GateRedError
from anabranch.measure.path_arms import all_arms
from anabranch.measure.simulated_peers import Exchange, LinkModel, SimulatedPeers
from anabranch.measure.slice import Slice
from anabranch.measure.slice_times import time_slice
from anabranch.models.dummy import load_dummy
from anabranch.models.kimi import KimiForCausalLM
from anabranch.models.tiny import tiny_config
from anabranch.parallel.layout import Layout

CPU, FP32 = torch.device("cpu"), torch.float32
TP8, DEP4, MIXED = Layout(tp=8), Layout(tp=4, dp_attention=4, ep=4), Layout(tp=4, dp_attention=2, ep=2)
ROWS, CONTEXT, HIDDEN, LATENT = 5, 70, 64, 32


@pytest.fixture(autouse=True)
def _few_samples(monkeypatch):
    torch.manual_seed(0)
    for name, value in (("ROUNDS", 1), ("SAMPLES", 1), ("CALLS", 2)):
        monkeypatch.setattr(slice_times, name, value)
    with torch.inference_mode():
        yield


def made(layout=TP8, architecture="k3", **options):
    config = parse_model_config(tiny_config(architecture))
    return Slice(config, layout, device=CPU, dtype=FP32, rows=ROWS, context=CONTEXT, **options)


@pytest.mark.parametrize("layout", [TP8, DEP4, MIXED], ids=str)
def test_every_arm_runs_its_path_and_gives_a_row(layout):
    subject = made(layout)
    names = all_arms(subject.config, subject.model.plan)
    assert names == ["separate", "split", "whole", "overlap", "fused", "fused+merged"]
    with counters.counting() as ran:
        result = time_slice(subject, names, LinkModel())
    rows = [json.loads(json.dumps(row)) for row in result.rows()]
    assert [row["arm"] for row in rows] == names
    for row in rows:
        assert row["case"]["layers"] == [4, 5, 6, 7]
        assert row["case"]["router_rows"] == ROWS * layout.dp_attention
        assert row["case"]["banked_sums"] == 2
        assert len(row["us"]) == 1
        assert row["floor_us"] > 0
        assert row["equality"] in ("bitwise", "tolerance")
    # 3 layers: the gate, then 2 slices for warm-up and sample, then as many of prologues alone; the base has a twin
    # (A/A) with 1 warm-up and 2 samples more, its own A/A sample, and the pass that counts experts is the plan's
    assert ran["kda.split"] == 3 + 2 * 3 * 2 + 2 * 3 * 2
    assert ran["kda.separate"] == 3 + (2 + 1 + 3) * 3 * 2 * 2
    assert ran["mla.merged"] == 1 + 2 * 2 + 1
    text = "\n".join(result.lines())
    assert all(f"\n  {name} " in text for name in names)
    assert "not executed and in no time above" in text


def test_it_is_the_model_in_the_middle():
    """The layers of the whole model, given the same stream and states, make the same bits."""
    subject = made(Layout())
    whole = KimiForCausalLM(parse_model_config(tiny_config("k3")), dtype=FP32, device=CPU).eval()
    load_dummy(whole)
    got = subject.run()
    subject.rewind()
    stream = Stream(subject.inputs.prefix, list(subject.bank), subject.inputs.pending)
    for number, cache in zip(subject.layers, subject.cache.layers, strict=True):
        whole.model.layers[str(number)](stream, subject.batch, cache)
    assert torch.equal(got.prefix, stream.prefix)
    assert torch.equal(got.pending, stream.pending)
    assert not torch.equal(subject.run(2).prefix, got.prefix)


@pytest.mark.parametrize("layout", [TP8, DEP4, MIXED], ids=str)
def test_exchanges_are_those_of_the_layout(layout):
    subject, size = made(layout), 4
    subject.run(2)
    own, every = ROWS * size, ROWS * size * layout.dp_attention
    attention = [Exchange("all_reduce", layout.attn_tp, own * HIDDEN)] if layout.attn_tp > 1 else []
    if layout.dp_attention == 1:
        ffn = [Exchange("all_reduce", layout.tp, own * (LATENT + HIDDEN))]
    else:
        ffn = [
            Exchange("all_gather", layout.dp_attention, every * HIDDEN),
            Exchange("reduce_scatter", layout.dp_attention, every * (LATENT + HIDDEN)),
        ]
        if layout.attn_tp > 1:
            ffn.append(Exchange("all_reduce", layout.attn_tp, own * (LATENT + HIDDEN)))
    assert subject.exchanges() == (attention + ffn) * 4


def test_routers_see_the_rows_of_all_replicas_and_compute_local_experts():
    subject, seen = made(DEP4), []
    for ffn in (layer.block_sparse_moe for layer in subject.model.model.layers.values()):
        ffn.gate.register_forward_hook(lambda gate, inputs, out: seen.append((inputs[0].clone(), out[1])))
    touched = subject.touched()
    others = [x[ROWS:] for x, _ in seen]
    assert [len(x) for x, _ in seen] == [ROWS * 4] * 4
    assert all(x.isfinite().all() and 0.8 < x.std() < 1.2 for x in others)
    assert len({tuple(x[0, :4].tolist()) for x in others}) == 4
    local = [experts[experts < 2] for _, experts in seen]  # the first of 4 groups has 2 of 8
    assert touched.choices_mean == sum(map(len, local)) / 4
    assert touched.experts_mean == sum(len(set(x.tolist())) for x in local) / 4
    assert 0 < touched.choices_mean < ROWS * 4 * 3


def test_the_floor_counts_what_is_touched():
    subject = made(Layout())
    touched = subject.touched()
    moved, us = subject.floor(touched)
    parts = [p for n, p in subject.model.model.layers.named_parameters() if ".experts." not in n]
    packed = [p for n, p in subject.model.model.layers.named_parameters() if ".experts." in n]
    weights = sum(p.numel() * p.element_size() for p in parts)
    weights += sum(p.numel() * p.element_size() for p in packed) * touched.experts_mean / 8
    latent = ROWS * CONTEXT * 40 * 4
    state = 3 * (2 * ROWS * 8 * 16 * 16 * 4 + 5 * ROWS * 8 * 16 * 2)
    assert moved == pytest.approx(weights + latent + state)
    assert us == pytest.approx((weights + latent) / 4.65e6 + state / 4.3e6)


def wrong(weights, x):
    outputs = KDA_FULL_RANK["split"].run(weights, x)
    outputs.forget[0, 0] += 3.0
    return outputs


def poisoned(weights, x):
    outputs = KDA_FULL_RANK["split"].run(weights, x)
    outputs.gate[0, 0] = float("nan")
    return outputs


@pytest.mark.parametrize("path", [wrong, poisoned])
def test_a_wrong_path_is_not_timed(monkeypatch, path):
    monkeypatch.setitem(KDA_FULL_RANK, "whole", replace(KDA_FULL_RANK["whole"], run=path))
    with pytest.raises(GateRedError, match="layer 4, whole, output: "):
        time_slice(made(), ["separate", "whole"], LinkModel())


def test_a_state_that_is_not_finite_is_told():
    subject = made()
    subject.cache.layers[1].state[2, 0, 3, 4] = float("inf")
    with pytest.raises(GateRedError, match="a recurrent state is not finite"):
        subject.check_states()
    subject.rewind()
    subject.check_states()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["separate", "quick"], "path 'quick': kda accepts separate, "),
        (["separate", "whole+none"], r"path 'whole\+none': mla accepts separate, "),
        (["separate", "separate"], "an arm is named twice"),
        (["deferred"], "path 'deferred': kda=deferred cannot be honoured: "),
    ],
)
def test_arms_that_are_refused(names, message):
    with pytest.raises(ValueError, match=message):
        time_slice(made(), names, LinkModel())


def test_models_and_layouts_without_a_slice():
    with pytest.raises(ValueError, match="no slice kda-kda-kda-mla whose FFNs are all experts"):
        made(Layout(), "kl")
    with pytest.raises(ValueError, match="is not divisible by"):
        made(Layout(tp=3))
    config = replace(parse_model_config(tiny_config("k3")), activation=ActivationConfig(name="silu"))
    assert Slice(config, Layout(), device=CPU, dtype=FP32, rows=2, context=3).run().prefix.shape == (2, HIDDEN)


def test_a_modelled_time_follows_from_its_assumptions():
    link = LinkModel(bytes_per_s=100e9, efficiency=0.5, latency_us=3.0)
    assert link.us(Exchange("all_reduce", 8, 4_000_000)) == pytest.approx(3 + 2 * 7 / 8 * 80)
    assert link.us(Exchange("all_gather", 16, 4_000_000)) == pytest.approx(3 + 15 / 16 * 80)
    assert str(link) == "3 us + bytes sent by a rank in a ring / (100 GB/s x 0.5)"


def test_peers_place_own_rows_where_the_replica_is():
    peers = SimulatedPeers(MIXED.rank(3))  # the second replica
    x, counts = torch.randn(3, 4), (2, 3)
    rows = peers.gather_rows(x, counts)
    assert rows.shape == (5, 4)
    assert torch.equal(rows[2:], x)
    assert torch.equal(peers.sum_rows(rows, counts), x)
    assert [e.ranks for e in peers.noted] == [2, 2, 2]
    again = peers.gather_rows(x, counts)
    assert not torch.equal(again[:2], rows[:2])
    peers.begin()
    assert torch.equal(peers.gather_rows(x, counts), rows)

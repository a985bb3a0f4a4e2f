"""Planned bytes are the allocated bytes: weights, states, latent rows, pad, and nothing for fusion."""

import pytest
import torch
from helpers.configs import K3_FILE, KL_FILE, small_k3, small_linear

from anabranch.config import FusionConfig
from anabranch.config.hf import load_model_config, parse_model_config
from anabranch.engine.cache import PAGE, Cache, CacheShape
from anabranch.engine.footprint import capacity, footprint, meta_model
from anabranch.fusion.buffer import MergedWeight
from anabranch.models.kimi import KimiForCausalLM
from anabranch.parallel.layout import Layout


def test_stored_elements_are_those_of_the_real_checkpoints():
    """Counts of the published tensor lists, vision part left out; Kimi-K3 stores 128 A_log for 96 heads."""
    kl = meta_model(load_model_config(KL_FILE), Layout(), 0, torch.bfloat16, FusionConfig())
    assert sum(p.numel() for p in kl.parameters()) == 49_122_681_728
    k3 = meta_model(load_model_config(K3_FILE), Layout(), 0, torch.bfloat16, FusionConfig())
    experts = 896 * 92 * 17_547_264
    rest = 69 * (443_740_416 - 32) + 24 * 232_196_096 + 726_663_168 + 92 * 189_927_808
    ends = 93 * 43_008 + 2 * 1_174_405_120 + 3 * 7_168
    assert sum(p.numel() for p in k3.parameters()) == experts + rest + ends


@pytest.mark.parametrize("make", [small_linear, small_k3])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=4, dp_attention=2, ep=2), Layout(tp=2, pp=3)])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_planned_bytes_are_allocated_bytes_on_every_rank(make, layout, state):
    config, slots, pages = parse_model_config(make()), 3, 5
    planned = {}
    for stage in range(layout.pp):
        f = footprint(meta_model(config, layout, stage * layout.tp, torch.bfloat16, FusionConfig()), layout, state)
        planned |= dict.fromkeys(range(f.ranks[0], f.ranks[1] + 1), f)
    assert list(planned) == list(range(layout.world))
    for rank, f in planned.items():
        place = layout.rank(rank)
        model = KimiForCausalLM(config, parallel=place, dtype=torch.bfloat16, device="cpu")
        shape = CacheShape.of(config, place, torch.bfloat16, state)
        cache = Cache(config, place, shape, slots=slots, pages=pages, device="cpu")
        storages = {p.untyped_storage() for p in model.parameters()}
        assert f.weight_bytes == sum(s.nbytes() for s in storages)
        assert slots * f.state_bytes_per_request + (pages + 1) * PAGE * f.latent_bytes_per_token == cache.bytes
        assert footprint(model, layout, state) == f
        assert (f.kda_layers + f.mla_layers, f.layers[0]) == (len(model.model.layers), model.model.stage.start)


@pytest.mark.parametrize("make", [small_linear, small_k3])
def test_merging_costs_its_pad_and_nothing_else(make, monkeypatch):
    config = parse_model_config(make())
    model = meta_model(config, Layout(tp=4, dp_attention=2, ep=4), 0, torch.bfloat16, FusionConfig())
    f = footprint(model, Layout(tp=4, dp_attention=2, ep=4), torch.float32)
    projections = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    assert f.fusion_bytes == 0
    assert f.pad_bytes > 0
    assert f.weight_bytes == projections + f.pad_bytes

    views = MergedWeight.rows
    monkeypatch.setattr(MergedWeight, "rows", lambda self, *names: views(self, *names).clone())
    assert footprint(model, Layout(tp=4, dp_attention=2, ep=4), torch.float32).fusion_bytes > 0


def test_a_partial_page_counts_whole_and_the_fullest_stage_decides():
    layout = Layout(pp=2)
    config = parse_model_config(small_linear())
    stages = [
        footprint(meta_model(config, layout, r, torch.float32, FusionConfig()), layout, torch.float32) for r in (0, 1)
    ]
    assert stages[1].request_bytes(1) == stages[1].request_bytes(PAGE) < stages[1].request_bytes(PAGE + 1)
    memory = stages[0].weight_bytes + 3 * stages[0].request_bytes(64)
    assert stages[1].requests(memory, 64) != 3
    assert capacity(stages, layout, memory, 64).requests == min(3, stages[1].requests(memory, 64))

"""Merged buffers: zero-copy views, un-merged names, no extra bytes, pad rows that stay zero."""

import pytest
import torch
from helpers.oracle import model_config
from helpers.ref_tiny import kimi_k3_tiny, kimi_linear_tiny, param_shapes
from torch import nn

from anabranch.fusion.buffer import MergedOwner, MergedWeight, Segment
from anabranch.models.kimi import KimiForCausalLM


class Owner(MergedOwner):
    def __init__(self) -> None:
        super().__init__()
        parts = [Segment("q_proj", 5), Segment("g_proj", 2)]
        self.in_proj = MergedWeight(parts, (3,), pad_to=16, dtype=torch.float32)
        self.other = nn.Linear(3, 3, bias=False)


def test_views_are_live_and_cover_the_buffer_once():
    merged = Owner().in_proj
    assert merged.buffer.shape == (16, 3)
    assert merged.rows("q_proj", "pad").data_ptr() == merged.buffer.data_ptr()
    merged.rows("q_proj").fill_(1.0)
    merged.rows("g_proj").fill_(2.0)
    assert merged.buffer[:, 0].tolist() == [1.0] * 5 + [2.0] * 2 + [0.0] * 9
    assert (merged.size("q_proj", "g_proj"), merged.size("pad")) == (7, 9)


def test_state_dict_has_the_unmerged_names_and_loads_them():
    a, b = Owner(), Owner()
    a.in_proj.buffer[:7] = torch.arange(21.0).reshape(7, 3)
    state = nn.Sequential(a).state_dict()
    assert list(state) == ["0.q_proj.weight", "0.g_proj.weight", "0.other.weight"]
    assert state["0.q_proj.weight"].data_ptr() == a.in_proj.buffer.data_ptr()
    nn.Sequential(b).load_state_dict(state)
    assert torch.equal(b.in_proj.buffer, a.in_proj.buffer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("q_proj.weight"), r"Missing.*q_proj\.weight"),
        (lambda s: s.update({"x_proj.weight": torch.zeros(1)}), r"Unexpected.*x_proj\.weight"),
        (lambda s: s.update({"g_proj.weight": torch.zeros(3, 3)}), r"g_proj\.weight: shape \(3, 3\), need \(2, 3\)"),
    ],
)
def test_wrong_state_dicts_are_refused_by_name(change, message):
    owner = Owner()
    state = dict(owner.state_dict())
    change(state)
    with pytest.raises(RuntimeError, match=message):
        Owner().load_state_dict(state)


@pytest.mark.parametrize("tiny", [kimi_linear_tiny(), kimi_k3_tiny()])
def test_whole_models_have_the_checkpoint_names_and_no_extra_bytes(tiny):
    model = KimiForCausalLM(model_config(tiny))
    want = {n: s for n, s in param_shapes(tiny).items() if not n.endswith("A_log")}
    state = model.state_dict()
    assert {n: tuple(t.shape) for n, t in state.items() if not n.endswith("A_log")} == want
    pad = 0
    for module in model.modules():
        if isinstance(module, MergedWeight):
            waste = module.rows("pad")
            assert not waste.any()
            assert module.size("pad") < 16
            pad += waste.numel() * waste.element_size()
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    assert held == sum(t.numel() * t.element_size() for t in state.values()) + pad
    # every name is a view of a parameter, not a copy of one
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert {t.untyped_storage().data_ptr() for t in state.values()} == owned

"""Choosing operations: first that fits, wishes honoured or refused by name, deterministic pairs kept together."""

from dataclasses import replace

import pytest
import torch
from helpers.oracle import model_config
from helpers.ref_tiny import kimi_linear_tiny

from anabranch.config.verdict import Verdict
from anabranch.ops.registry import IMPLEMENTATIONS, OP_NAMES, select

CONFIG = model_config(kimi_linear_tiny())
OPTIONAL = ("kda_step", "kda_inputs", "mla_step", "norm_route", "expert_ffn")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_every_operation_runs_on_a_cpu_in_both_modes():
    assert set(IMPLEMENTATIONS) == set(OP_NAMES)
    for deterministic in (False, True):
        selection = select(CONFIG, CPU, deterministic=deterministic)
        assert all(callable(getattr(selection.ops, name)) for name in OP_NAMES if name not in OPTIONAL)
        chain = [name for name in OPTIONAL if selection.chosen[name][0] == "chain"]
        assert chain == [name for name in OPTIONAL if deterministic or name != "kda_step"]
        assert all(getattr(selection.ops, name) is None for name in chain)
    normal, fixed = select(CONFIG, CPU).chosen, select(CONFIG, CPU, deterministic=True).chosen
    assert (normal["linear"][0], normal["kda_step"][0]) == ("reference", "cpu")
    assert fixed["linear"] == (
        "deterministic",
        "first that fits; skinny: not batch-invariant; reference: not batch-invariant; segmented: needs cuda; "
        "triton: needs cuda",
    )


def test_a_shape_that_a_kernel_was_not_made_for_is_refused_with_the_shape():
    with pytest.raises(ValueError, match="op mla_decode=triton cannot be honoured: needs cuda"):
        select(CONFIG, CPU, wishes={"mla_decode": "triton"})
    verdict = IMPLEMENTATIONS["mla_decode"][0].verdict(CONFIG, CUDA, False)
    assert (verdict.ok, verdict.reason) == (False, "needs qk_rope_head_dim to be a power of two from 16, it is 8")


def test_wishes_are_honoured_or_refused():
    chosen = select(CONFIG, CPU, wishes={"linear": "deterministic"}).chosen
    assert chosen["linear"] == ("deterministic", "asked for")
    with pytest.raises(ValueError, match=r"op 'lineal' is unknown; accepted: linear, "):
        select(CONFIG, CPU, wishes={"lineal": "reference"})
    with pytest.raises(
        ValueError, match="op linear=cuda: accepted are skinny, reference, segmented, triton, deterministic"
    ):
        select(CONFIG, CPU, wishes={"linear": "cuda"})
    with pytest.raises(ValueError, match="op linear=reference cannot be honoured: not batch-invariant"):
        select(CONFIG, CPU, deterministic=True, wishes={"linear": "reference"})


def test_forms_of_one_layer_are_not_mixed_in_deterministic_mode(monkeypatch):
    from anabranch.ops import registry

    pair = registry.IMPLEMENTATIONS | {"mla_prefill": (registry._INVARIANT_REFERENCE,)}
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", pair)
    with pytest.raises(ValueError, match="mla_decode=deterministic with mla_prefill=reference: deterministic mode"):
        select(CONFIG, CPU, deterministic=True)


def test_a_dtype_or_tap_count_that_a_kernel_does_not_take_is_refused():
    fla = next(i for i in IMPLEMENTATIONS["kda_prefill"] if i.name == "fla")
    step = IMPLEMENTATIONS["kda_step"][1]
    anywhere = replace(fla, package=None)
    assert anywhere.verdict(CONFIG, CUDA, False, torch.bfloat16).ok
    assert anywhere.verdict(CONFIG, CUDA, False, torch.float32).reason == "does not compute in float32"
    other = replace(CONFIG, kda=replace(CONFIG.kda, conv_size=3))
    assert replace(step, package=None).verdict(other, CUDA, False).reason == "needs short_conv_kernel_size=4, it is 3"
    flash = replace(next(i for i in IMPLEMENTATIONS["kda_prefill"] if i.name == "flash"), package=None)
    wide = {bound: replace(CONFIG.kda, head_dim=128, gate_lower_bound=bound) for bound in (None, -5.0, -6.0)}
    verdicts = {bound: flash.verdict(replace(CONFIG, kda=kda), CUDA, False) for bound, kda in wide.items()}
    assert verdicts[-5.0].ok
    for bound in (None, -6.0):
        assert verdicts[bound].reason == f"needs a gate bounded by -5 to 0 (gate_lower_bound), it is {bound}"


def test_cudnn_prefill_is_refused_with_the_sizes_and_the_library(monkeypatch):
    prefill = replace(IMPLEMENTATIONS["mla_prefill"][0], package=None)
    sizes = "needs attention heads of 64, 128, 192 or 256, they are 24 and 16"
    assert prefill.verdict(CONFIG, CUDA, False).reason == sizes
    fitting = replace(CONFIG, mla=replace(CONFIG.mla, nope_dim=128, rope_dim=64, v_dim=128))
    assert prefill.verdict(fitting, CUDA, False).reason == "needs cuDNN 9.10 on a Hopper GPU, found none"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    for version, ok in ((91002, True), (90500, False)):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        assert prefill.verdict(fitting, CUDA, False).ok == ok


def test_native_kernels_are_refused_with_the_device_and_the_shape(monkeypatch):
    native = IMPLEMENTATIONS["kda_step"][0]
    assert native.verdict(CONFIG, CPU, False).reason == "needs cuda"
    assert native.verdict(CONFIG, CUDA, True).reason == "not batch-invariant"
    assert native.verdict(CONFIG, CUDA, False, torch.float32).reason == "does not compute in float32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert native.verdict(CONFIG, CUDA, False).reason == "needs a Hopper GPU (sm_90), this one is sm_100"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("anabranch.ops.native.verdict", lambda folder: Verdict(True, folder))
    assert native.verdict(CONFIG, CUDA, False).reason == "needs the KDA head_dim to be 128, it is 16"
    monkeypatch.setattr("anabranch.ops.native.verdict", lambda folder: Verdict(False, "needs nvcc"))
    assert native.verdict(None, CUDA, False).reason == "needs nvcc"


def test_who_saves_states_on_the_way():
    saving = [i.name for i in IMPLEMENTATIONS["kda_prefill"] if i.saves]
    assert saving == ["cuda", "chunked", "reference"]
    normal = select(CONFIG, CPU).ops
    assert normal.prefill_saves
    assert callable(normal.conv_save)
    assert not select(CONFIG, CPU, deterministic=True).ops.prefill_saves

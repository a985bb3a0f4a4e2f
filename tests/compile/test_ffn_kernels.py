"""FFN-side kernels at the shapes of the released models: they fit an H200, spill nothing, and every bf16 product is a
wgmma, which is what the equality of bits between tiles rests on."""

import re
from dataclasses import replace

import pytest
import torch
from helpers.banks import mxfp4_bank, plain_bank

from anabranch.config.model import ActivationConfig, ModelConfig
from anabranch.ops.attn_residual.triton import residual_norm
from anabranch.ops.expert_ffn.triton import expert_ffn
from anabranch.ops.expert_sum.triton import expert_sum
from anabranch.ops.experts.plan import Plan, Tile
from anabranch.ops.experts.triton import routed_experts
from anabranch.ops.gate.triton import sigmoid_gate
from anabranch.ops.glu.triton import glu
from anabranch.ops.linear.triton import linear
from anabranch.ops.log_softmax.triton import log_softmax, pick
from anabranch.ops.norm.triton import add_rms_norm, gated_rms_norm, l2_norm, rms_norm
from anabranch.ops.router.triton import route

SITU = ActivationConfig(name="situ", beta=4.0, linear_beta=25.0)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def only_wgmma(used) -> None:
    for u in used:
        if u.name in ("_gate_up", "_down", "_linear", "_logits", "_route"):
            assert "wgmma.mma_async.sync.aligned.m64" in u.ptx, u.name
            assert "\tmma.sync" not in u.ptx, u.name


def launch_experts(config: ModelConfig, tokens: int, bank, width: int) -> None:
    assert config.moe is not None
    k = config.moe.top_k
    x, weights, chosen = meta(tokens, width), meta(tokens, k, dtype=torch.float32), meta(tokens, k, dtype=torch.int64)
    routed_experts(x, weights, chosen, bank, config.activation)


@pytest.mark.parametrize("tokens", [1, 32, 600, 2048, 8192])
def test_experts_of_kimi_linear(compiled, real_kl, tokens):
    bank = plain_bank(256, 1024, 2304, torch.bfloat16, device="meta")
    launch_experts(real_kl, tokens, bank, 2304)
    only_wgmma(compiled.check())
    assert len(compiled) == {1: 3, 32: 4}.get(tokens, 6)


@pytest.mark.parametrize("tokens", [1, 64, 2048, 20_000])
def test_mxfp4_experts_of_one_of_eight_k3_ranks(compiled, real_k3, tokens):
    bank = mxfp4_bank(896, 384, 3584, torch.bfloat16, device="meta")
    launch_experts(real_k3, tokens, bank, 3584)
    used = compiled.check()
    only_wgmma(used)
    if tokens == 64:
        codes_go_straight_to_wgmma(used)


def codes_go_straight_to_wgmma(used) -> None:
    """Codes and scales come by asynchronous copies; the weights made of them see no shared memory."""
    for u in used:
        if u.name in ("_gate_up", "_down"):
            before = u.ptx[: u.ptx.rindex("wgmma.mma_async")]
            assert "mul.rn.bf16x2" in before, u.name
            assert "cp.async" in before, u.name
            assert not re.search(r"st\.shared|stmatrix|ld\.global\S*\.[bu]8", before), u.name


def test_mxfp4_experts_of_one_of_sixteen_k3_ranks(compiled, real_k3):
    bank = mxfp4_bank(56, 3072, 3584, torch.bfloat16, total=896, device="meta")
    launch_experts(real_k3, 512, bank, 3584)
    used = compiled.check()
    only_wgmma(used)
    codes_go_straight_to_wgmma(used)
    assert all("m64n16k16" in u.ptx for u in used if u.name in ("_gate_up", "_down"))  # about 9 pairs an expert


def launch_ffn(config: ModelConfig, tokens: int, bank, shared: int, plan: Plan | None = None) -> None:
    """Router and experts with a shared expert of the given inner width."""
    moe, width = config.moe, config.hidden_size
    assert moe is not None
    x, bias, sync = meta(tokens, width), meta(moe.experts, dtype=torch.float32), meta(1, dtype=torch.int32)
    weights, chosen = route(x, meta(moe.experts, width), bias, moe, sync)
    matrices = meta(2 * shared, width), meta(width, shared)
    latent = meta(tokens, moe.latent_size) if moe.latent_size else None
    expert_ffn(x, weights, chosen, bank, config.activation, matrices, linear, latent=latent, plan=plan)


@pytest.mark.parametrize(("tokens", "launches"), [(1, 4), (4, 4), (16, 5), (17, 6), (64, 6)])
def test_a_decode_step_of_kimi_linear_is_few_launches(compiled, real_kl, tokens, launches):
    launch_ffn(real_kl, tokens, plain_bank(256, 1024, 2304, torch.bfloat16, device="meta"), 1024)
    used = compiled.check()
    only_wgmma(used)
    assert len(compiled) == launches
    for u in used:
        if u.name in ("_gate_up", "_down"):  # 16 bytes a copy, also where the shared expert's segments start
            assert "cp.async.cg" in u.ptx
            assert "cp.async.ca" not in u.ptx


@pytest.mark.parametrize(("tokens", "launches"), [(1, 6), (8, 6)])
def test_a_decode_step_of_one_of_eight_k3_ranks(compiled, real_k3, tokens, launches):
    launch_ffn(real_k3, tokens, mxfp4_bank(896, 384, 3584, torch.bfloat16, device="meta"), 768)
    only_wgmma(compiled.check())
    assert len(compiled) == launches


def test_a_tile_of_half_the_rows_is_a_wgmma_too(compiled, real_kl):
    plan = Plan(wide=Tile(T=16, R=32, K=128), narrow=Tile(T=16, R=64, K=128))
    launch_ffn(real_kl, 1, plain_bank(256, 1024, 2304, torch.bfloat16, device="meta"), 1024, plan)
    only_wgmma(compiled.check())


def test_a_tile_of_256_pairs_and_its_tail_fit(compiled, real_kl):
    wide = Tile(T=256, R=64, K=64, num_warps=8, stacked=True)
    narrow = Tile(T=256, R=128, K=64, num_warps=8)
    launch_ffn(
        real_kl,
        8192,
        plain_bank(256, 1024, 2304, torch.bfloat16, device="meta"),
        1024,
        Plan(wide=wide, narrow=narrow, tail=32),
    )
    used = [u for u in compiled.check() if u.name in ("_gate_up", "_down")]
    only_wgmma(used)
    assert len(used) == 2
    for u in used:
        assert {"m64n256k16", "m64n32k16"} == set(re.findall(r"m64n\d+k16", u.ptx))


@pytest.mark.parametrize("tokens", [1, 64, 512])
def test_linear(compiled, tokens):
    linear(meta(tokens, 2304), meta(12448, 2304))
    linear(meta(tokens, 7168), meta(6288, 7168))
    only_wgmma(compiled.check())


def test_linear_in_fp32(compiled):
    linear(meta(4, 2304, dtype=torch.float32), meta(12448, 2304, dtype=torch.float32))
    compiled.check()


@pytest.mark.parametrize("tokens", [1, 128, 1024, 2048, 8192])
def test_router(compiled, real_kl, real_k3, tokens):
    for config in (real_kl, real_k3):
        moe, width = config.moe, config.hidden_size
        route(meta(tokens, width), meta(moe.experts, width), meta(moe.experts, dtype=torch.float32), moe)
    with pytest.raises(ValueError, match="groups=8"):
        route(meta(1, 16), meta(16, 16), meta(16, dtype=torch.float32), replace(real_kl.moe, groups=8))
    used = compiled.check()
    only_wgmma(used)
    if tokens == 8192:  # the large tile runs its five stages ahead
        for u in used[::2]:
            assert set(re.findall(r"m64n\d+k16", u.ptx)) == {"m64n128k16"}
            assert u.shared == 5 * 64 * (128 + 128) * 2


@pytest.mark.parametrize(("tokens", "words"), [(64, 0), (128, 0), (1024, 9), (8192, 9)])
def test_expert_sum(compiled, real_kl, real_k3, tokens, words):
    """Many tokens: every addend passes the second-level cache by, in words of 16 bytes."""
    for config, width in ((real_kl, 2304), (real_k3, 3584)):
        chosen = meta(tokens, config.moe.top_k, dtype=torch.int64)
        out, weights = meta(chosen.numel(), width), meta(*chosen.shape, dtype=torch.float32)
        expert_sum(out, weights, chosen, 0, 64, meta(tokens, width), meta(tokens, width))
    used = compiled.check()
    assert used[0].ptx.count("ld.global.L1::evict_first.L2::cache_hint.v4.b32") == words


def test_a_norm_starts_early_only_where_it_adds_an_update(compiled):
    """Early reads rest on the first norm of a pass, which has none."""
    x, weight = meta(8, 2304), meta(2304)
    rms_norm(x, weight, 1e-5)
    add_rms_norm(x, x, weight, 1e-5)
    for update in (None, x):
        residual_norm(x, update, [x] * 3, weight, weight[None], weight, 1e-5)
    used = compiled.check()
    assert [k.metadata.launch_pdl for k in compiled] == [False, True, False, True]
    assert all("griddepcontrol.wait" in u.ptx and "griddepcontrol.launch_dependents" in u.ptx for u in used)


def test_kernels_within_a_pass_start_early(compiled):
    x = meta(8, 4096)
    gated_rms_norm(x.unflatten(-1, (32, 128)), x, meta(128, dtype=torch.float32), 1e-5)
    glu(meta(8, 2048), ActivationConfig(name="silu"))
    used = compiled.check()
    assert [k.metadata.launch_pdl for k in compiled] == [True, True]
    for u in used:  # nothing is read before the wait
        assert u.ptx.index("griddepcontrol.wait") < u.ptx.index("ld.global")
        assert "griddepcontrol.launch_dependents" in u.ptx
    assert used[0].ptx.count("L1::evict_first") + used[0].ptx.count("L2::cache_hint") >= 2


def test_row_kernels(compiled):
    for width in (2304, 7168):
        x, weight = meta(8, width), meta(width)
        rms_norm(x, weight, 1e-5)
        add_rms_norm(x, x, weight, 1e-5)
        for update in (x, None):
            residual_norm(x, update, [x] * 8, weight, weight[None], weight, 1e-5)
    for heads in (12, 32, 96):
        x = meta(8, 3 * heads * 128)[:, : heads * 128].unflatten(-1, (heads, 128))
        l2_norm(x)
        gated_rms_norm(x, meta(8, heads * 128), meta(128, dtype=torch.float32), 1e-5)
    sigmoid_gate(meta(8, 1536), meta(8, 3696)[:, 2160:])
    glu(meta(8, 2048), ActivationConfig(name="silu"))
    glu(meta(8, 12288), SITU)
    log_softmax(meta(8, 163_840, dtype=torch.float32))
    pick(meta(8, 163_840, dtype=torch.float32))
    compiled.check()

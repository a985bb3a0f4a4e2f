"""Every merged path equals the separate GEMMs, at every shard and row count, with the launches it declares."""

import pytest
import torch
from helpers.oracle import model_config
from helpers.ref_tiny import kimi_k3_tiny, kimi_linear_tiny

from anabranch.config.fusion import FusionConfig
from anabranch.config.model import ModelConfig
from anabranch.config.parallel import ParallelConfig
from anabranch.fusion import counters
from anabranch.fusion.buffer import MergedWeight
from anabranch.fusion.kda_paths import kda_paths
from anabranch.fusion.mla_paths import mla_paths
from anabranch.fusion.plan import make_plan
from anabranch.fusion.prologue import EQUALITY
from anabranch.layers.build import Build
from anabranch.layers.kda import KdaLayer
from anabranch.layers.mla import MlaLayer
from anabranch.models.weights import RULES, rank_of, shard
from anabranch.ops.registry import select
from anabranch.ops.skinny_gemm.spec import PROLOGUE_TOKENS
from anabranch.parallel.collectives import SingleRank
from anabranch.parallel.layout import Layout

ROWS = (1, 2, 7, 16, 17, 32, 64, 65, 128, 129, 512)
FULL = kimi_k3_tiny(kda_heads=24, heads=24)
LOW = kimi_linear_tiny(kda_heads=24, heads=24)
LOW_LORA = kimi_linear_tiny(kda_heads=24, heads=24, q_lora=40)


def build(config: ModelConfig, parallel: ParallelConfig, dtype: torch.dtype, device=None) -> Build:
    return Build(
        config=config,
        parallel=parallel,
        plan=make_plan(config, FusionConfig(), "float32"),
        ops=select(config, torch.device("cpu")).ops,
        comm=SingleRank(),
        dtype=dtype,
        device=device,
    )


def layer(kind, config: ModelConfig, parallel: ParallelConfig, dtype: torch.dtype):
    return kind(build(config, parallel, dtype))


def fill(module: torch.nn.Module) -> None:
    for name, view in module.state_dict().items():
        view.copy_(torch.randn(view.shape) / view.shape[-1] ** 0.5 if view.dim() > 1 else torch.rand(view.shape) + 0.5)
        assert name


def take_shard(local: torch.nn.Module, full: torch.nn.Module, parallel: ParallelConfig) -> None:
    weights = full.state_dict()
    for name, view in local.state_dict().items():
        rule = RULES[name.removesuffix(".weight").split(".")[-1]]
        view.copy_(shard(weights[name], rule, *rank_of(rule, parallel)))


def separate_gemms(state: dict, x: torch.Tensor, names: dict[str, str]) -> dict[str, torch.Tensor]:
    """One GEMM for each name; `a>b` is b applied to a's output."""
    out = {}
    for key, chain in names.items():
        y = x
        for name in chain.split(">"):
            y = torch.nn.functional.linear(y, state[f"{name}.weight"])
        out[key] = y
    return out


def forked(path: str) -> dict[str, int]:
    """What a path's fork counts on a device without streams."""
    return {"fork.in_order": 1} if path == "overlap" else {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attn_tp", [1, 2, 4, 8])
@pytest.mark.parametrize("tiny", [FULL, LOW], ids=["full-rank", "low-rank"])
def test_kda_paths_equal_separate_gemms(tiny, attn_tp, dtype):
    config = model_config(tiny)
    torch.manual_seed(0)
    full = layer(KdaLayer, config, ParallelConfig(), dtype)
    fill(full)
    rank = attn_tp - 1
    parallel = ParallelConfig(tp_size=16, attn_tp_size=attn_tp, attn_tp_rank=rank)
    local = layer(KdaLayer, config, parallel, dtype)
    take_shard(local, full, parallel)
    x = torch.randn(max(ROWS), config.hidden_size).to(dtype)
    chains = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "beta": "b_proj", "forget": "f_a_proj>f_b_proj"}
    chains["gate"] = "g_proj" if tiny.full_rank_gate else "g_a_proj>g_b_proj"
    heads = slice(rank * 24 // attn_tp, (rank + 1) * 24 // attn_tp)
    for rows in ROWS:
        # the shard's values are the whole model's, cut to the rank's heads
        want = separate_gemms(full.state_dict(), x[:rows], chains)
        cut = {k: t.unflatten(-1, (24, -1))[:, heads].flatten(1) for k, t in want.items()}
        for name, path in kda_paths(tiny.full_rank_gate).items():
            with counters.counting() as ran:
                got = path.run(local.prologue.weights, x[:rows])
            launches = 2 if name == "fused" and rows > PROLOGUE_TOKENS else path.gemms
            assert ran == {"kda.gemm": launches} | forked(name)
            # check 5 of the edge cases: f_a's width if and only if the decay is deferred
            assert path.complete == (got.f_b is None) == (name != "deferred")
            assert got.forget.shape == (rows, config.kda.head_dim if name == "deferred" else local.width)
            with counters.counting() as ran:
                got = got.finished(local.prologue.weights)
            assert ran == ({} if path.complete else {"kda.gemm": 1, "kda.f_b_late": 1})
            q, k, v = got.qkv.chunk(3, -1)
            for key, value in {
                "q": q,
                "k": k,
                "v": v,
                "beta": got.beta,
                "forget": got.forget,
                "gate": got.gate,
            }.items():
                assert value.stride(-1) == 1
                EQUALITY.check(value.contiguous(), cut[key], f"{name} {key} at M={rows}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attn_tp", [1, 2, 4, 8])
@pytest.mark.parametrize("tiny", [FULL, LOW, LOW_LORA], ids=["gated", "plain", "plain q_lora"])
def test_mla_paths_equal_separate_gemms(tiny, attn_tp, dtype):
    config = model_config(tiny)
    torch.manual_seed(0)
    full = layer(MlaLayer, config, ParallelConfig(), dtype)
    fill(full)
    parallel = ParallelConfig(tp_size=8, attn_tp_size=attn_tp, attn_tp_rank=attn_tp - 1)
    local = layer(MlaLayer, config, parallel, dtype)
    take_shard(local, full, parallel)
    x = torch.randn(max(ROWS), config.hidden_size).to(dtype)
    chains = {"q": "q_a_proj" if tiny.q_lora else "q_proj", "kv": "kv_a_proj_with_mqa"}
    if tiny.mla_gate:
        chains["gate"] = "g_proj"
    for rows in ROWS:
        want = separate_gemms(local.state_dict(), x[:rows], chains)
        for name, path in mla_paths(tiny.mla_gate).items():
            with counters.counting() as ran:
                got = path.run(local.prologue.weights, x[:rows])
                gate = got.gate and got.gate.take()
            assert ran == {"mla.gemm": path.gemms} | forked(name)
            assert (gate is None) == (not tiny.mla_gate)
            for key, value in want.items():
                value_got = gate if key == "gate" else getattr(got, key)
                EQUALITY.check(value_got.contiguous(), value, f"{name} {key} at M={rows}")


@pytest.mark.parametrize("heads", [3, 5, 6])
def test_odd_head_counts_pad_to_16_rows(heads):
    config = model_config(kimi_k3_tiny(kda_heads=heads, heads=heads))
    kda = layer(KdaLayer, config, ParallelConfig(), torch.float32)
    assert kda.in_proj.buffer.shape[0] % 16 == 0
    fill(kda)
    x = torch.randn(7, config.hidden_size)
    results = [path.run(kda.prologue.weights, x) for path in kda_paths(True).values()]
    for other in results[1:]:
        EQUALITY.check(other.beta.contiguous(), results[0].beta)


def test_pad_columns_are_never_read():
    """NaN in the pad rows of the weights must not reach any output."""
    for tiny in (FULL, LOW):
        kda = layer(KdaLayer, model_config(tiny), ParallelConfig(), torch.float32)
        fill(kda)
        assert kda.in_proj.size("pad") > 0
        kda.in_proj.rows("pad").fill_(float("nan"))
        for path in kda_paths(tiny.full_rank_gate).values():
            out = path.run(kda.prologue.weights, torch.randn(3, 64))
            for t in (out.qkv, out.finished(kda.prologue.weights).forget, out.beta, out.gate):
                assert t.isfinite().all()


def test_in_place_weight_updates_are_seen_by_every_path():
    config = model_config(FULL)
    kda = layer(KdaLayer, config, ParallelConfig(), torch.float32)
    fill(kda)
    x = torch.randn(4, config.hidden_size)
    for name in ("f_a_proj.weight", "b_proj.weight", "f_b_proj.weight", "g_proj.weight"):
        kda.state_dict()[name].mul_(-2.0)
    want = separate_gemms(kda.state_dict(), x, {"beta": "b_proj", "forget": "f_a_proj>f_b_proj", "gate": "g_proj"})
    for path in kda_paths(True).values():
        got = path.run(kda.prologue.weights, x).finished(kda.prologue.weights)
        for key, value in want.items():
            EQUALITY.check(getattr(got, key).contiguous(), value)


def shapes(config: ModelConfig, layout: Layout) -> tuple[MergedWeight, MergedWeight]:
    on_meta = build(config, layout.rank(layout.world - 1), torch.bfloat16, "meta")
    return KdaLayer(on_meta).in_proj, MlaLayer(on_meta).in_proj


@pytest.mark.parametrize(
    ("layout", "qkvg", "whole", "bfa", "mla"),
    [
        (Layout(tp=16, dp_attention=16, ep=16), 49152, 49376, 224, 14400),
        (Layout(tp=4), 12288, 12448, 160, 5184),
        (Layout(tp=8), 6144, 6288, 144, 3648),
        (Layout(tp=16), 3072, 3216, 144, 2880),
        (Layout(tp=32), 1536, 1680, 144, 2496),
    ],
)
def test_k3_rows_at_every_layout(real_k3, layout, qkvg, whole, bfa, mla):
    in_proj, mla_proj = shapes(real_k3, layout)
    assert in_proj.size("q_proj", "g_proj") == qkvg
    assert in_proj.size("q_proj", "pad") == whole
    assert in_proj.size("f_a_proj", "pad") == bfa
    assert mla_proj.buffer.shape[0] == mla
    assert in_proj.size("q_proj", "v_proj") == 3 * qkvg // 4


def test_one_layer_at_true_k3_tp8_width(real_k3):
    """6144 + 144 rows, K = 7168, bf16: the real GEMM shapes once, against the separate ones."""
    kda = layer(KdaLayer, real_k3, Layout(tp=8).rank(3), torch.bfloat16)
    torch.manual_seed(0)
    kda.in_proj.buffer[: kda.in_proj.used_rows].normal_(std=7168**-0.5)
    kda.second.buffer.normal_(std=128**-0.5)
    x = torch.randn(2, 7168).bfloat16()
    weights = kda.prologue.weights
    want, *others = (path.run(weights, x).finished(weights) for path in kda_paths(True).values())
    for got in others:
        for key in ("qkv", "forget", "beta", "gate"):
            EQUALITY.check(getattr(got, key).contiguous(), getattr(want, key).contiguous(), key)

"""Block-FP8 attention: a checkpoint equals its dequantised twin in every path, layout and spelling, at half size."""

import copy
import threading
from dataclasses import replace

import pytest
import torch
from helpers.checkpoints import (
    Tensors,
    dequantized,
    official,
    raw_fp8,
    weights_of,
    with_exact_scales,
    write,
)
from helpers.configs import kimi_k3
from helpers.oracle import Session
from helpers.ranks import ThreadRank, run_ranks

from anabranch.config.fusion import FusionConfig
from anabranch.config.hf import parse_model_config
from anabranch.config.model import ModelConfig
from anabranch.config.parallel import ParallelConfig
from anabranch.fusion import counters
from anabranch.fusion.buffer import Fp8MergedWeight
from anabranch.layers.kda import KdaLayer
from anabranch.layers.mla import MlaLayer
from anabranch.models.checkpoint import load_checkpoint
from anabranch.models.dummy import load_dummy
from anabranch.models.fp8 import Dequantized
from anabranch.models.inventory import checkpoint_tensors
from anabranch.models.kimi import KimiForCausalLM
from anabranch.models.load import load_model
from anabranch.models.tiny import tiny_config
from anabranch.models.weights import copy_shard
from anabranch.ops.fp8_linear.reference import CODES
from anabranch.parallel.layout import Layout

# a hidden size of two scale columns, and projections of whole blocks: all merges of the real models are legal
WIDE = {"hidden_size": 192, "q_lora_rank": 128, "num_attention_heads": 16}
RAW = {"kl": raw_fp8("kl", **(WIDE | {"q_lora_rank": None})), "k3": raw_fp8("k3", **WIDE)}
CONFIGS = {name: parse_model_config(raw) for name, raw in RAW.items()}
QUANT = tiny_config("k3", fp8=True)["text_config"]["quantization_config"]
PROMPT = [(7 * i + 3) % 250 for i in range(70)]


def model(config: ModelConfig, directory, **kw) -> KimiForCausalLM:
    made = KimiForCausalLM(config, **kw)
    load_checkpoint(made, directory)
    return made


def twin(tensors: Tensors, directory, config: ModelConfig, **kw) -> KimiForCausalLM:
    return model(replace(config, fp8=()), write(dequantized(tensors), directory), **kw)


def logits(of: KimiForCausalLM) -> torch.Tensor:
    """A prompt in two chunks and two tokens one by one."""
    session = Session(of, pages=4)
    parts = [session.step((0, PROMPT[:40]))[0], session.step((0, PROMPT[40:]))[0]]
    return torch.cat([*parts, *(session.step((0, [t]), decodes=1)[0] for t in (5, 6))])


@pytest.fixture(params=CONFIGS)
def case(request) -> tuple[ModelConfig, Tensors]:
    config = CONFIGS[request.param]
    return config, official(config)


def test_the_model_holds_codes_where_the_checkpoint_has_them(case):
    config, tensors = case
    made = KimiForCausalLM(config)
    prefix = "language_model." if config.is_k3 else ""
    for name, view in made.state_dict().items():
        stored, leaf = tensors[prefix + name], name.split(".")[-2]
        plain = leaf in ("f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj", "kv_b_proj")
        assert (view.dtype == CODES) == (stored.dtype == CODES and not plain), name
    kda, mla = (getattr(made.plan, kind) for kind in ("kda", "mla"))
    assert (kda.path, mla.path) == ("split", "merged" if config.is_k3 else "separate")
    assert "f_a_proj, b_proj dequantised at load: kept plain" in kda.reason
    assert "q_proj is block-FP8 and f_a_proj is float32: merging would lose its scales" in kda.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_equal_those_of_the_dequantised_twin_bit_for_bit(case, dtype, tmp_path):
    """Deterministic products add in one order, and scales of powers of two leave bf16 nothing to round: only a wrong
    scale, row or code can differ."""
    config, tensors = case
    exact = tensors if dtype == torch.float32 else with_exact_scales(tensors)
    fp8 = model(config, write(exact, tmp_path / "fp8"), dtype=dtype, deterministic=True)
    with counters.counting() as ran:
        got = logits(fp8)
    layers = {kind: config.layer_count(kind) for kind in ("kda", "mla")}
    # QKVG or QKV and o_proj of a KDA layer; one or two input GEMMs, q_b_proj and o_proj of an MLA layer
    each = 2 * layers["kda"] + (3 if config.is_k3 else 2) * layers["mla"]
    assert ran["fp8.gemm"] == 4 * each
    assert (ran["kda.split"], ran["mla.merged" if config.is_k3 else "mla.separate"]) == (
        4 * layers["kda"], 4 * layers["mla"],
    )  # fmt: skip
    want = logits(twin(exact, tmp_path / "plain", config, dtype=dtype, deterministic=True))
    assert torch.equal(got, want)


def test_normal_mode_is_within_the_declared_class(case, tmp_path):
    config, tensors = case
    got = logits(model(config, write(tensors, tmp_path / "fp8")))
    want = logits(twin(tensors, tmp_path / "plain", config))
    assert (got - want).abs().max() <= 2e-4 * want.abs().max()
    wrong = {n: t * 1.05 if n.endswith("1.self_attn.q_proj.weight_scale_inv") else t for n, t in tensors.items()}
    other = logits(model(config, write(wrong, tmp_path / "wrong")))
    assert (got - other).abs().max() > 2e-3 * want.abs().max(), "a wrong scale must not hide in the tolerance"


@pytest.mark.parametrize("path", ["separate", "split", "overlap", "single"])
def test_every_legal_path_gives_the_same_bits(path, tmp_path):
    config, tensors = CONFIGS["k3"], official(CONFIGS["k3"])
    directory = write(tensors, tmp_path)
    want = logits(model(config, directory, deterministic=True))
    mla = "separate" if path == "split" else path
    other = model(config, directory, deterministic=True, fusion=FusionConfig(kda=path, mla=mla))
    with counters.counting() as ran:
        assert torch.equal(logits(other), want)
    assert ran[f"kda.{path}"] == 4 * config.layer_count("kda")


@pytest.mark.parametrize("kind", ["weight_scale", "4-D weight_scale"])
def test_the_other_spelling_of_scales(case, kind, tmp_path):
    config, tensors = case
    want = model(config, write(tensors, tmp_path / "a"))
    spelled = {}
    for name, tensor in tensors.items():
        if name.endswith(".weight_scale_inv"):
            name = name.removesuffix("_inv")
            tensor = tensor[:, None, :, None].clone() if "4-D" in kind else tensor
        spelled[name] = tensor
    assert _same_bits(model(config, write(spelled, tmp_path / "b")), want)


def test_scales_may_lie_in_other_files_than_their_codes(case, tmp_path):
    config, tensors = case
    want = model(config, write(tensors, tmp_path / "one"))
    codes = {n: t for n, t in tensors.items() if not n.endswith("_scale_inv")}
    apart = codes | {n: t for n, t in tensors.items() if n not in codes}
    assert _same_bits(model(config, write(apart, tmp_path / "many", shards=5)), want)


def test_the_files_decide_and_not_the_config(tmp_path):
    raw = copy.deepcopy(RAW["kl"])
    del raw["quantization_config"]
    config, tensors = CONFIGS["kl"], official(CONFIGS["kl"])
    loaded = load_model(write(tensors, tmp_path / "silent", raw), device="cpu")
    assert loaded.config.fp8 == config.fp8
    plain = load_model(write(dequantized(tensors), tmp_path / "boasting", RAW["kl"]), device="cpu")
    assert plain.config.fp8 == ()
    assert plain.plan.kda.path == "whole"


def test_weights_outside_attention_are_dequantised(tmp_path):
    """A checkpoint with everything in block-FP8, routed experts and head included."""
    config = CONFIGS["kl"]
    modules = {
        n.removesuffix(".weight")
        for n, s in checkpoint_tensors(replace(config, fp8=())).items()
        if len(s.shape) == 2 and "norm" not in n
    }
    everything = replace(config, fp8=tuple(sorted(modules)))
    tensors = official(everything)
    got = model(everything, write(tensors, tmp_path / "a"))
    assert got.state_dict()["model.layers.1.block_sparse_moe.experts.3.w2.weight"].dtype == torch.float32
    assert torch.equal(
        got.state_dict()["model.layers.1.block_sparse_moe.experts.3.w2.weight"],
        dequantized(tensors)["model.layers.1.block_sparse_moe.experts.3.w2.weight"],
    )
    want = logits(twin(tensors, tmp_path / "b", config))
    assert (logits(got) - want).abs().max() <= 2e-4 * want.abs().max()


def test_layers_may_differ(tmp_path):
    """An ignore list that names whole layers and single projections: every verdict is about what is really held."""
    config = CONFIGS["k3"]
    out = ("layers.1.self_attn", "layers.2.self_attn.g_proj", "layers.3.self_attn.g_proj")
    mixed = replace(config, fp8=tuple(name for name in config.fp8 if not any(o in name for o in out)))
    tensors = official(mixed)
    made = model(mixed, write(tensors, tmp_path / "a"), deterministic=True)
    assert (made.plan.kda.path, made.plan.mla.path) == ("separate", "separate")
    assert "layer 2: q_proj is block-FP8 and g_proj is float32" in made.plan.kda.verdicts["split"].reason
    assert "layer 3: q_a_proj is block-FP8 and g_proj is float32" in made.plan.mla.verdicts["merged"].reason
    want = twin(tensors, tmp_path / "b", mixed, deterministic=True)
    assert torch.equal(logits(made), logits(want))


@pytest.mark.parametrize("held", ["q_proj", "v_proj"])
def test_a_group_that_no_gemm_can_share_is_computed_one_by_one(held, tmp_path):
    config = CONFIGS["kl"]
    mixed = replace(config, fp8=tuple(n for n in config.fp8 if not n.endswith(f"2.self_attn.{held}")))
    tensors = official(mixed)
    made = model(mixed, write(tensors, tmp_path / "a"), deterministic=True)
    assert made.plan.kda.path == "single"
    assert torch.equal(logits(made), logits(twin(tensors, tmp_path / "b", mixed, deterministic=True)))


class TestBytes:
    def test_attention_projections_halve(self, real_k3):
        """Kimi-K3 at TP8: exactly one byte a weight, four for each block, and pads below one block."""
        names = ("q_proj", "k_proj", "v_proj", "g_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
        fp8 = tuple(
            f"model.layers.{i}.self_attn.{n}"
            for i, kind in enumerate(real_k3.layer_kinds)
            for n in (names[:5] if kind == "kda" else names[3:])
        )
        kw = {"parallel": Layout(tp=8).rank(3), "dtype": torch.bfloat16, "device": "meta"}
        plain, coded = (KimiForCausalLM(c, **kw) for c in (real_k3, replace(real_k3, fp8=fp8)))
        for layer in ("0", "3"):
            a, b = (m.model.layers[layer].self_attn for m in (plain, coded))
            weights = {n: t for n, t in b.state_dict().items() if t.dtype == CODES}
            blocks = sum(t.numel() for n, t in b.state_dict().items() if n.endswith("_scale_inv"))
            as_bf16 = sum(t.nbytes for n, t in a.state_dict().items() if n in weights)
            assert sum(t.nbytes for t in weights.values()) == as_bf16 // 2
            pads = [m.size("pad") * m.buffer.shape[1] for m in b.modules() if isinstance(m, Fp8MergedWeight)]
            assert _bytes(a) - _bytes(b) == as_bf16 // 2 - 4 * blocks - sum(pads)
            assert _bytes(b) < 0.52 * _bytes(a) + _bytes(b.kv_b_proj if layer == "3" else b.second)

    def test_nothing_is_held_twice(self, case, tmp_path):
        config, tensors = case
        made = model(config, write(tensors, tmp_path))
        state = made.state_dict().values()
        owned = {p.untyped_storage().data_ptr() for p in made.parameters()}
        assert {t.untyped_storage().data_ptr() for t in state} == owned
        pads = sum(m.rows("pad").nbytes for m in made.modules() if hasattr(m, "rows") and hasattr(m, "buffer"))
        assert sum(p.nbytes for p in made.parameters()) == sum(t.nbytes for t in state) + pads


class TestRanks:
    def config(self) -> ModelConfig:
        raw = raw_fp8("k3", **WIDE)
        raw["text_config"]["linear_attn_config"] |= {"num_heads": 16}
        return parse_model_config(raw)

    @pytest.mark.parametrize("tp", [2, 4])
    def test_shards_take_their_scales_or_are_dequantised(self, tp, tmp_path):
        """256 rows: two ranks hold a scale block each, four would share one and are dequantised."""
        config = self.config()
        directory = write(official(config), tmp_path)
        board, barrier = {}, threading.Barrier(tp)

        def build(rank: int) -> KimiForCausalLM:
            place = Layout(tp=tp).rank(rank)
            return model(config, directory, parallel=place, comm=ThreadRank(place, board, barrier))

        ranks = [build(rank) for rank in range(tp)]
        kept = ranks[1].model.layers["0"].self_attn.state_dict()["g_proj.weight"].dtype == CODES
        assert kept == (tp == 2)
        if tp == 4:
            assert "a rank's 64 would start inside a 128-wide scale block" in ranks[0].plan.kda.reason
        whole = model(config, directory)
        want = logits(whole)
        for got in run_ranks(tp, lambda rank: logits(ranks[rank])):
            assert (got - want).abs().max() <= 2e-4 * want.abs().max()

    @pytest.mark.parametrize("heads", [96, 12])
    def test_beta_rows_inside_one_scale_block(self, heads):
        """96 beta rows lie under one row of scales; every rank of 8 dequantises its own 12 with it (check 13)."""
        raw = raw_fp8("kl")
        raw["linear_attn_config"] |= {"num_heads": heads, "head_dim": 16}
        config = parse_model_config(raw)
        tensors = weights_of(config, 0, torch.bfloat16)
        name = "model.layers.0.self_attn.b_proj.weight"
        full = Dequantized(tensors[name], tensors[f"{name}_scale_inv"])
        want = dequantized(tensors)[name]
        ranks = 4 if heads == 12 else 8
        for rank in range(ranks):
            view = torch.empty(heads // ranks, config.hidden_size)
            place = ParallelConfig(tp_size=ranks, tp_rank=rank, attn_tp_size=ranks, attn_tp_rank=rank)
            copy_shard(view, full, name, config, place)
            assert torch.equal(view, want[rank * heads // ranks : (rank + 1) * heads // ranks])


def test_rows_of_pads_and_gaps_never_reach_an_output(tmp_path):
    """Codes of NaN in every row that belongs to no projection (check 12)."""
    config = replace(CONFIGS["k3"], mla=replace(CONFIGS["k3"].mla, q_lora_rank=40))
    made = model(config, write(official(config), tmp_path))
    want = logits(made)
    poisoned = 0
    for module in made.modules():
        if isinstance(module, Fp8MergedWeight):
            used = torch.zeros(module.buffer.shape[0], dtype=torch.bool)
            for segment in module.segments:
                first = module._span[segment.name][0]
                used[first : first + segment.rows] = True
            module.buffer.data.view(torch.uint8)[~used] = 127
            poisoned += int((~used).sum())
    assert poisoned > 0
    assert torch.equal(logits(made), want)


def test_scale_grid_of_the_real_shapes(real_k3):
    """N = 3648 and 6144 + 144: every row of the buffer lies under a scale, every segment starts one (check 12)."""
    config = replace(real_k3, fp8=parse_model_config(kimi_k3(quantization_config=QUANT)).fp8)
    on = KimiForCausalLM(config, parallel=Layout(tp=8).rank(0), dtype=torch.bfloat16, device="meta")
    kda, mla = (on.model.layers[i].self_attn for i in ("0", "3"))
    assert isinstance(kda, KdaLayer)
    assert isinstance(mla, MlaLayer)
    assert (tuple(kda.in_proj_fp8.buffer.shape), tuple(kda.in_proj_fp8.scale.shape)) == ((6144, 7168), (48, 56))
    assert kda.in_proj.buffer.shape == (144, 7168)
    assert [s.name for s in mla.in_proj.segments] == ["g_proj", "q_a_proj", "kv_a_proj_with_mqa"]
    assert (tuple(mla.in_proj.buffer.shape), tuple(mla.in_proj.scale.shape)) == ((3648, 7168), (29, 56))
    assert on.plan.mla.path == "merged"
    assert on.plan.kda.path == "split"


def test_dummy_weights_follow_the_config():
    """Seeded codes of plausible size, merges made before any is read (check 14)."""
    config = CONFIGS["k3"]
    a, b = KimiForCausalLM(config), KimiForCausalLM(config)
    load_dummy(a, 3)
    load_dummy(b, 3)
    assert _same_bits(a, b)
    attention = a.model.layers["0"].self_attn
    assert 0.015 < dequantized(dict(attention.state_dict()))["q_proj.weight"].std() < 0.025
    assert logits(a).isfinite().all()
    meta = KimiForCausalLM(config, device="meta")
    assert {n: t.shape for n, t in meta.state_dict().items()} == {n: t.shape for n, t in a.state_dict().items()}


def test_state_dicts_round_trip(case, tmp_path):
    config, tensors = case
    a = model(config, write(tensors, tmp_path))
    b = KimiForCausalLM(config)
    b.load_state_dict(a.state_dict())
    assert _same_bits(a, b)


def _same_bits(a: KimiForCausalLM, b: KimiForCausalLM) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(
        left[n].dtype == right[n].dtype and torch.equal(left[n].view(torch.uint8), right[n].view(torch.uint8))
        for n in left
    )


def _bytes(module: torch.nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())

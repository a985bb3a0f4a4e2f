"""Resolved formats: what is held in block-FP8, which merges keep their scales, and buffers in which none can stray."""

from dataclasses import replace

import pytest
import torch
from helpers.configs import kimi_k3, kimi_linear

from anabranch.config.fusion import FusionConfig
from anabranch.config.hf import parse_model_config
from anabranch.config.model import ModelConfig
from anabranch.config.parallel import ParallelConfig
from anabranch.fusion.buffer import Fp8MergedWeight, MergedWeight, Segment, SplitWeight
from anabranch.fusion.plan import make_plan
from anabranch.fusion.product import Adapted, Adapter, Fp8Rows
from anabranch.fusion.rules import FP8, Projection, merge_verdict, plain_projections, resolve, verdicts
from anabranch.models.tiny import tiny_config
from anabranch.ops.fp8_linear.reference import dequantize, quantize
from anabranch.parallel.layout import Layout

GROUPS = tiny_config("k3", fp8=True)["text_config"]["quantization_config"]
DEEPSEEK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
K3 = parse_model_config(kimi_k3(quantization_config=GROUPS))
KL = parse_model_config(kimi_linear(quantization_config=DEEPSEEK))
ONE = ParallelConfig()


def held(config: ModelConfig, layer: int, parallel: ParallelConfig = ONE) -> set[str]:
    return {n for n, p in resolve(config, parallel, "bfloat16")[layer].items() if p.quantization == FP8}


def test_what_the_released_shapes_hold_in_codes():
    wide = {"q_proj", "k_proj", "v_proj", "o_proj"}
    for parallel in (ONE, Layout(tp=8).rank(5), Layout(tp=16, dp_attention=16, ep=16).rank(3), Layout(tp=32).rank(31)):
        assert held(K3, 0, parallel) == wide | {"g_proj"}
        assert held(K3, 3, parallel) >= {"q_a_proj", "kv_a_proj_with_mqa", "g_proj", "o_proj"}
        assert held(KL, 0, parallel) == wide
    assert "q_b_proj" in held(K3, 3, Layout(tp=8).rank(0))


def test_a_shard_inside_a_scale_block_is_dequantised_with_the_reason():
    """Kimi-Linear's 192 query rows a head: 32 ranks of one head each would share blocks."""
    thin = resolve(KL, Layout(tp=32).rank(7), "bfloat16")[3]
    assert thin["q_proj"].quantization is None
    assert thin["q_proj"].note == "a rank's 192 would start inside a 128-wide scale block"
    assert resolve(KL, Layout(tp=16).rank(7), "bfloat16")[3]["q_proj"].quantization == FP8
    plan = make_plan(KL, FusionConfig(), "bfloat16", parallel=Layout(tp=32).rank(7))
    assert "q_proj dequantised at load: a rank's 192 would start" in plan.mla.reason
    assert plan.mla.path == "single"


def test_the_plan_of_coded_attention_keeps_every_scale():
    for parallel in (ONE, Layout(tp=8).rank(0)):
        k3, kl = (make_plan(c, FusionConfig(), "bfloat16", parallel=parallel) for c in (K3, KL))
        assert (k3.kda.path, k3.mla.path) == ("split", "merged")
        assert (kl.kda.path, kl.mla.path) == ("split", "separate")
        assert "q_proj is block-FP8 and f_a_proj is bfloat16: merging would lose its scales" in k3.kda.reason
    with pytest.raises(ValueError, match="fusion kda=whole cannot be honoured: q_proj is block-FP8 and f_a_proj is bf"):
        make_plan(K3, FusionConfig(kda="whole"), "bfloat16")


def test_a_quantised_config_with_plain_attention_engages_every_fusion(real_k3):
    """Check 40: the verdict is about the projections, not about the config that quantises the experts."""
    assert real_k3.expert_format == "mxfp4"
    plan = make_plan(real_k3, FusionConfig(), "bfloat16")
    assert (plan.kda.path, plan.mla.path) == ("whole", "merged")
    assert all(v.ok for v in (*plan.kda.verdicts.values(), *plan.mla.verdicts.values()))


@pytest.mark.parametrize("config", [K3, KL], ids=["k3", "kl"])
@pytest.mark.parametrize("layer", [0, 3])
def test_no_combination_of_formats_merges_codes_with_anything_else(config, layer):
    """Every subset of coded members (check 40): a path is allowed only if each of its groups is of one format."""
    kind = config.layer_kinds[layer]
    names = list(plain_projections(config, kind, "bfloat16"))
    from anabranch.fusion.rules import path_groups

    for bits in range(1 << len(names)):
        coded = {name for i, name in enumerate(names) if bits >> i & 1}
        members = {
            n: Projection(dtype="bfloat16", quantization=FP8 if n in coded else None, rows=256)
            for n in (*names, "g_proj")
        }
        for path, verdict in verdicts(config, kind, members).items():
            groups = path_groups(config, kind)[path]
            uniform = all(set(group) <= coded or not set(group) & coded for group in groups)
            if path == "single":
                assert verdict.ok
            elif path == "deferred" and not config.kda.full_rank_gate:
                assert "g_b needs a launch of its own" in verdict.reason
            elif path == "deferred" and "f_b_proj" in coded:
                assert verdict.reason == "f_b_proj is block-FP8: the decode step takes it plain"
            elif not (kind == "mla" and not config.mla.output_gate and path in ("merged", "overlap")):
                assert verdict.ok == uniform, (path, coded)
                assert verdict.ok or "merging would lose its scales" in verdict.reason


def test_other_quantisations_never_merge():
    members = plain_projections(K3, "kda", "bfloat16")
    odd = Projection(dtype="bfloat16", quantization="per-channel FP8")
    both = members | {"f_a_proj": odd, "b_proj": odd}
    assert merge_verdict((("f_a_proj", "b_proj"),), both).reason == (
        "f_a_proj is per-channel FP8: merging would lose its scales"
    )


def test_a_block_must_not_be_shared_between_projections():
    inside = {n: Projection(dtype="b", quantization=FP8, rows=r) for n, r in (("q", 192), ("k", 64), ("v", 128))}
    assert (
        merge_verdict((("q", "k"),), inside).reason == "q ends 64 rows into a 128-row scale block: none may start there"
    )
    assert merge_verdict((("v", "q"),), inside).ok


class TestBuffer:
    def make(self, *rows: int, columns: int = 200) -> tuple[Fp8MergedWeight, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        merged = Fp8MergedWeight([Segment(f"s{i}", r) for i, r in enumerate(rows)], columns)
        values = {}
        for i, r in enumerate(rows):
            codes, scale = quantize(torch.randn(r, columns) * (i + 1))
            merged.rows(f"s{i}").copy_(codes)
            merged.scales(f"s{i}").copy_(scale)
            values[f"s{i}"] = dequantize(codes, scale)
        return merged, values

    def value(self, factor) -> torch.Tensor:
        assert isinstance(factor, Fp8Rows)
        return dequantize(factor.codes, factor.scale)

    @pytest.mark.parametrize("rows", [(128, 256, 40), (256,), (128, 12)])
    def test_any_run_of_segments_has_its_own_scales(self, rows):
        merged, values = self.make(*rows)
        for first in range(len(rows)):
            for last in range(first, len(rows)):
                want = torch.cat([values[f"s{i}"] for i in range(first, last + 1)])
                assert torch.equal(self.value(merged.factor(f"s{first}", f"s{last}")), want)
        whole = self.value(merged.factor("s0", "pad"))
        assert whole.shape[0] % 16 == 0
        assert not whole[sum(rows) :].any()

    def test_segments_start_blocks_and_gaps_are_zero_and_never_multiplied(self):
        merged, values = self.make(40, 130, 16)
        assert [merged._span[f"s{i}"] for i in range(3)] == [(0, 40), (128, 258), (384, 400)]
        assert tuple(merged.scale.shape) == (4, 2)
        for name, want in values.items():
            assert torch.equal(self.value(merged.factor(name)), want)
        assert not merged.buffer[40:128].float().any()
        assert not merged.buffer[258:384].float().any()
        for first, last in (("s0", "s1"), ("s1", "s2"), ("s0", "pad")):
            with pytest.raises(AssertionError, match="spans a gap"):
                merged.factor(first, last)

    def test_bytes_are_one_a_weight_and_four_a_block(self):
        merged, _ = self.make(256, 128, columns=384)
        plain = MergedWeight([Segment("a", 256), Segment("b", 128)], (384,), pad_to=16, dtype=torch.bfloat16)
        assert merged.bytes == plain.bytes // 2 + 4 * 3 * 3
        views = dict(merged.views())
        assert {v.untyped_storage().data_ptr() for v in views.values()} == {
            merged.buffer.untyped_storage().data_ptr(), merged.scale.untyped_storage().data_ptr(),
        }  # fmt: skip

    def test_two_formats_answer_as_one(self):
        coded, values = self.make(128, 128)
        tail = MergedWeight([Segment("t", 5), Segment("u", 3)], (200,), pad_to=16, dtype=torch.float32)
        tail.rows("t", "u").copy_(torch.randn(8, 200))
        both = SplitWeight(coded, tail)
        assert [s.name for s in both.segments] == ["s0", "s1", "t", "u"]
        assert torch.equal(self.value(both.factor("s0", "s1")), torch.cat([values["s0"], values["s1"]]))
        assert both.factor("t", "pad").data_ptr() == tail.buffer.data_ptr()
        assert (both.size("s0", "s1"), both.size("pad"), both.size("t", "pad")) == (256, 8, 16)
        for first, last in (("s1", "t"), ("s0", "pad")):
            with pytest.raises(AssertionError, match="lies in two buffers"):
                both.factor(first, last)

    def test_an_adapter_cannot_be_bypassed(self):
        merged, _ = self.make(128, 128)
        assert isinstance(merged.factor("s0", "s1"), Fp8Rows)
        merged.adapt("s1", Adapter(torch.zeros(2, 200), torch.zeros(128, 2), 1.0))
        assert isinstance(merged.factor("s1"), Adapted)
        assert isinstance(merged.factor("s0"), Fp8Rows)
        with pytest.raises(AssertionError, match=r"s0\.\.s1 would bypass an adapter"):
            merged.factor("s0", "s1")
        assert [n for n, _ in merged.named_parameters()] == ["buffer", "scale"]


def test_merged_buffers_take_whole_blocks_at_every_layout():
    """Row counts that the plan promises are those of the buffers, at every attention-TP of the released models."""
    from anabranch.models.kimi import KimiForCausalLM

    small = replace(K3, layer_kinds=K3.layer_kinds[:4], moe_layers=(False,) * 4, moe=None)
    small = replace(small, fp8=tuple(n for n in K3.fp8 if int(n.split(".")[2]) < 4))
    for tp in (1, 4, 8, 16, 32):
        model = KimiForCausalLM(small, parallel=Layout(tp=tp).rank(tp - 1), dtype=torch.bfloat16, device="meta")
        kda, mla = model.model.layers["0"].self_attn, model.model.layers["3"].self_attn
        assert kda.in_proj_fp8.buffer.shape[0] == 49152 // tp
        assert kda.in_proj.buffer.shape[0] == -(-(128 + 96 // tp) // 16) * 16
        assert mla.in_proj.buffer.shape[0] == 12288 // tp + 2112
        assert mla.prologue.weights.gated

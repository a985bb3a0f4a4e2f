"""Names, shapes, counts and shard rules, against the released checkpoints' totals and an independent rule table."""

import math
import re
from dataclasses import replace

import pytest
import torch
from helpers.checkpoints import config_of, filled, official, weights_of
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.models.inventory import checkpoint_tensors, count_parameters
from anabranch.models.kimi import KimiForCausalLM
from anabranch.models.weights import RULES, Part, Rule, StoredPart, copy_shard, leaf_of, locate, shard, stored_shape
from anabranch.parallel.layout import Layout

# 27 blocks of 2 norms, qkv, out, 2 MLP matrices; patch embedding, positions, norm; projector: 2 matrices, norm
VISION_ELEMENTS = (
    27 * (2 * 1024 + 3 * 1536 * 1024 + 1536 * 1024 + 2 * 4096 * 1024)
    + (1024 * 3 * 14 * 14 + 64 * 64 * 1024 + 1024)
    + (4096 * 4096 + 4096 * 7168 + 7168)
)
TINY = {
    "kl": config_of("kl"),
    "kl-q-lora": config_of("kl", q_lora_rank=24, num_shared_experts=0),
    "k3": config_of("k3"),
    "k3-plain": config_of("k3", quantization_config=None, latent_moe_use_norm=False),
}


@pytest.fixture(scope="module")
def k3_tensors(real_k3):
    return checkpoint_tensors(real_k3)


class TestInventory:
    def test_kimi_linear_totals(self, real_kl):
        tensors = checkpoint_tensors(real_kl)
        assert len(tensors) == 20_493
        assert count_parameters(real_kl) == 49_122_681_728
        assert sum(math.prod(spec.shape) for spec in tensors.values()) == 49_122_681_728
        assert round(sum(spec.bytes for spec in tensors.values()) / 2**30, 2) == 91.50

    def test_kimi_k3_totals(self, real_k3, k3_tensors):
        tensors = k3_tensors
        assert len(tensors) + 165 + 3 == 497_220
        assert count_parameters(real_k3) == 2_779_484_478_208
        assert VISION_ELEMENTS == 447_358_976
        stored = sum(math.prod(spec.shape) for spec in tensors.values())
        assert stored + VISION_ELEMENTS == 1_503_647_073_024
        assert sum(spec.bytes for spec in tensors.values()) + 2 * VISION_ELEMENTS == 1_560_860_324_864

    @pytest.mark.parametrize("case", [*TINY, "real kl", "real k3"])
    def test_models_have_exactly_these_tensors(self, case, real_kl, real_k3):
        # layers 0..4 of the real Kimi-K3 are one of each kind; all 93 take many seconds
        short = replace(real_k3, layer_kinds=real_k3.layer_kinds[:5], moe_layers=real_k3.moe_layers[:5])
        config = {"real kl": real_kl, "real k3": short, **TINY}[case]
        tensors = checkpoint_tensors(config)
        model = KimiForCausalLM(config, device="meta", dtype=torch.bfloat16).state_dict()
        assert model.keys() == tensors.keys()
        a_log = {name for name in tensors if name.endswith("A_log")}
        assert all(model[name].shape == tensors[name].shape for name in tensors.keys() - a_log)
        assert all(model[name].shape == (config.kda.heads,) for name in a_log)

    def test_stored_dtypes_and_a_log_differ_between_the_two(self, real_kl, k3_tensors):
        kl, k3 = checkpoint_tensors(real_kl), k3_tensors
        attention, ffn = "model.layers.0.self_attn.", "model.layers.1.block_sparse_moe."
        assert kl[f"{attention}A_log"] == ((1, 1, 32, 1), torch.float32)
        assert k3[f"{attention}A_log"] == ((128,), torch.float32)
        names = (f"{attention}q_conv1d.weight", f"{attention}o_norm.weight", f"{ffn}gate.e_score_correction_bias")
        assert [kl[n].dtype for n in names] == [torch.bfloat16] * 3
        assert [k3[n].dtype for n in names] == [torch.float32] * 3
        assert kl[f"{attention}dt_bias"].dtype == k3[f"{attention}dt_bias"].dtype == torch.float32
        assert k3[f"{ffn}experts.895.w2.weight_scale"] == ((3584, 96), torch.uint8)
        assert k3[f"{ffn}experts.895.w2.weight_packed"] == ((3584, 1536), torch.uint8)


class TestShard:
    @given(
        size=st.integers(1, 9),
        local=st.integers(1, 5),
        other=st.integers(1, 4),
        dim=st.integers(0, 1),
    )
    @settings(max_examples=40, deadline=None)
    def test_parts_join_to_the_whole(self, size, local, other, dim):
        shape = (size * local, other) if dim == 0 else (other, size * local)
        full = torch.arange(math.prod(shape)).view(shape)
        parts = [shard(full, Rule("tp", dim), rank, size) for rank in range(size)]
        assert all(part.shape[dim] == local for part in parts)
        assert torch.equal(torch.cat(parts, dim), full)

    @given(size=st.integers(1, 9), rows=st.integers(1, 30))
    @settings(max_examples=40, deadline=None)
    def test_padded_parts_join_to_the_whole_and_only_the_end_is_short(self, size, rows):
        full = torch.arange(rows * 2).view(rows, 2)
        parts = [shard(full, Rule("attn_tp", 0, padded=True), rank, size) for rank in range(size)]
        assert torch.equal(torch.cat(parts), full)
        lengths = [len(part) for part in parts]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] == -(-rows // size)

    def test_without_a_group_every_rank_has_all(self):
        full = torch.rand(3, 5)
        assert torch.equal(shard(full, Rule(), 2, 4), full)

    def test_uneven_division_is_refused(self):
        with pytest.raises(ValueError, match="dimension 1 of a weight=6 is not divisible by 4 ranks"):
            shard(torch.zeros(4, 6), Rule("tp", 1), 0, 4)

    def test_every_official_tensor_has_a_rule_and_no_rule_is_idle(self):
        assert {leaf_of(name) for config in TINY.values() for name in checkpoint_tensors(config)} == RULES.keys()

    def test_only_the_rank_s_rows_are_read(self):
        asked = []

        class Disk:
            def __getitem__(self, index):
                asked.append(index)
                return torch.ones(8, 128, 1, 4)[index] if len(index) == 4 else torch.ones(384, 1, 4)[index]

        config, place = TINY["kl"], Layout(tp=4).rank(3)
        part = StoredPart(Disk(), (384, 1, 4), Part("k_conv1d.weight", None, 128, 128))
        copy_shard(torch.zeros(32, 1, 4), part, "model.layers.0.self_attn.k_conv1d.weight", config, place)
        assert asked == [(slice(128 + 96, 128 + 128), slice(None), slice(None))]


# written from the specification once more, not from RULES: how a tensor of this name is put together from its ranks
JOINS = {
    "vocab": r"embed_tokens|lm_head",
    "heads": r"A_log",
    "rows": r"[qkv]_proj|[qkv]_conv1d|(f_b|g_b|g|b|q_b|kv_b)_proj|dt_bias|gate_proj|up_proj|w1|w3",
    "columns": r"o_proj|down_proj|w2",
    "same": r".*_?norm|(f_a|g_a|q_a)_proj|kv_a_proj_with_mqa|gate|e_score_correction_bias|.*res_proj|routed_expert_\w+",
}
LAYOUTS = [Layout(tp=n) for n in (1, 2, 4, 8)] + [Layout(tp=2, ep=2), Layout(tp=8, ep=2), Layout(tp=4, dp_attention=2)]


def join(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    leaf = next(part for part in reversed(name.split(".")) if not part.startswith("weight"))
    (kind,) = [kind for kind, pattern in JOINS.items() if re.fullmatch(pattern, leaf)]
    if kind == "same":
        assert all(torch.equal(part, parts[0]) for part in parts), name
        return parts[0]
    return torch.cat(parts, 1 if kind == "columns" else 0)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("architecture", ["kl", "k3"])
def test_rank_shards_join_to_the_full_tensors(architecture, layout):
    # a vocabulary that no rank count divides; Kimi-K3 stores an A_log longer than its heads
    config = config_of(architecture, vocab_size=269)
    weights = weights_of(config, 3, torch.float32)
    ranks = []
    for rank in range(layout.tp):
        model = KimiForCausalLM(config, parallel=layout.rank(rank))
        for name, view in model.state_dict().items():
            copy_shard(view, weights[name], name, config, layout.rank(rank))
        ranks.append(model.state_dict())
    for name, full in weights.items():
        holders = [state[name] for state in ranks if name in state]
        if ".experts." in name:
            assert len(holders) == layout.tp // layout.ep
        elif ".self_attn." in name or leaf_of(name) in ("embed_tokens", "lm_head"):
            replicas = [holders[i : i + layout.attn_tp] for i in range(0, layout.tp, layout.attn_tp)]
            assert all(torch.equal(a, b) for replica in replicas for a, b in zip(replica, replicas[0], strict=True))
            holders = replicas[0]
        joined = join(name, holders)
        if leaf_of(name) == "A_log":
            full = full.flatten()[:8]
        assert not joined[len(full) :].any(), name
        assert torch.equal(joined[: len(full)], full), name


def test_copy_ends_in_the_destination_s_dtype():
    model = filled(TINY["kl"], official(TINY["kl"]), torch.bfloat16)
    dtypes = {leaf_of(name): view.dtype for name, view in model.state_dict().items()}
    single = {"q_conv1d", "k_conv1d", "v_conv1d", "A_log", "dt_bias", "o_norm", "e_score_correction_bias"}
    assert {leaf for leaf, dtype in dtypes.items() if dtype == torch.float32} == single


class TestLocate:
    KL, K3 = TINY["kl"], TINY["k3"]

    @pytest.mark.parametrize(
        ("name", "found"),
        [
            ("model.embed_tokens.weight", "model.embed_tokens.weight"),
            ("language_model.model.norm.weight", "model.norm.weight"),
            ("language_model.norm.weight", "model.norm.weight"),
            ("language_model.lm_head.weight", "lm_head.weight"),
            ("language_model.layers.1.self_attn.b_proj.weight", "model.layers.1.self_attn.b_proj.weight"),
            ("model.layers.0.block_sparse_moe.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
            ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
            ("model.layers.1.mlp.gate.weight", "model.layers.1.block_sparse_moe.gate.weight"),
            ("model.layers.1.mlp.experts.7.w2.weight", "model.layers.1.block_sparse_moe.experts.7.w2.weight"),
            ("model.layers.2.mlp_res_norm.weight", "model.layers.2.mlp_res_norm.weight"),
            ("model.layers.2.self_attn.forget_gate.A_log", "model.layers.2.self_attn.A_log"),
            ("model.layers.2.self_attn.forget_gate.f_b_proj.weight", "model.layers.2.self_attn.f_b_proj.weight"),
        ],
    )
    def test_spellings(self, name, found):
        assert locate(name, self.KL) == [Part(found)]

    @pytest.mark.parametrize(
        "name", ["model.layers.6.self_attn.q_proj.weight", "model.layers.3.self_attn.rotary_emb.inv_freq"]
    )
    def test_ignored(self, name):
        assert locate(name, self.KL) == "ignored"

    def test_vision_belongs_to_kimi_k3_alone(self):
        assert locate("vision_tower.encoder.blocks.0.wqkv.weight", self.K3) == "vision"
        assert locate("mm_projector.post_norm.weight", self.K3) == "vision"
        assert locate("vision_tower.x", self.KL) == [Part("model.vision_tower.x")]

    def test_merged_names(self):
        tensors = checkpoint_tensors(self.KL)
        conv = locate("model.layers.0.self_attn.conv1d.weight", self.KL)
        assert [(part.name[-15:], part.first_row, part.rows) for part in conv] == [
            ("q_conv1d.weight", 0, 128),
            ("k_conv1d.weight", 128, 128),
            ("v_conv1d.weight", 256, 128),
        ]
        assert stored_shape(conv, tensors) == (384, 1, 4)
        gate_up = locate("model.layers.1.mlp.experts.gate_up_proj", self.KL)
        assert len(gate_up) == 16
        assert gate_up[3] == Part("model.layers.1.block_sparse_moe.experts.1.w3.weight", 1, 32, 32)
        assert stored_shape(gate_up, tensors) == (8, 64, 64)
        assert stored_shape(locate("model.layers.1.mlp.experts.down_proj", self.KL), tensors) == (8, 64, 32)

"""LoRA on attention projections: equal to merged weights in fp64, in every layout; it forbids exactly its merges."""

import json
import threading
from dataclasses import replace

import pytest
import torch
from helpers.adapters import merged, random_pairs, write_adapter
from helpers.checkpoints import config_of, dequantized, filled, official, raw_config, raw_fp8, weights_of, write
from helpers.oracle import Session
from helpers.ranks import ThreadRank, run_ranks
from safetensors.torch import load_file, save_file

from anabranch.config.fusion import FusionConfig
from anabranch.config.hf import parse_model_config
from anabranch.fusion import counters
from anabranch.models.checkpoint import load_checkpoint
from anabranch.models.kimi import KimiForCausalLM
from anabranch.models.load import load_model
from anabranch.models.lora import TARGETS, attach, read_adapter
from anabranch.models.update import update_weights
from anabranch.parallel.layout import Layout

CONFIGS = {"kl": config_of("kl"), "k3": config_of("k3", quantization_config=None)}
KDA_PATHS = ("separate", "split", "whole", "overlap", "fused", "single")
PROMPT = [(7 * i + 3) % 250 for i in range(70)]


def logits(of: KimiForCausalLM) -> torch.Tensor:
    session = Session(of, pages=4)
    parts = [session.step((0, PROMPT[:40]))[0], session.step((0, PROMPT[40:]))[0]]
    return torch.cat([*parts, *(session.step((0, [t]), decodes=1)[0] for t in (5, 6))])


def adapted(config, weights, directory, fusion: FusionConfig | None = None, **kw) -> KimiForCausalLM:
    adapter = read_adapter(directory, config)
    model = KimiForCausalLM(config, adapted=adapter.modules, fusion=fusion, **kw)
    if torch.get_default_dtype() == torch.float64:
        model.double()
        model.dtype = torch.float64
    fill(model, weights)
    assert attach(model, adapter) == len(adapter.pairs)
    return model


def fill(model: KimiForCausalLM, weights) -> KimiForCausalLM:
    for name, view in model.state_dict().items():
        full = weights[name]
        view.copy_(full.flatten()[: model.config.kda.heads] if name.endswith("A_log") else full)
    return model


@pytest.mark.parametrize(
    "leaves", [[leaf] for leaf in TARGETS] + [list(TARGETS)], ids=lambda x: x[0] if len(x) == 1 else "all"
)
@pytest.mark.parametrize("case", CONFIGS)
def test_equal_to_merged_weights_in_fp64(case, leaves, tmp_path, double_precision):
    """Check 16, for every projection alone and all together, on every path that the adapter leaves."""
    config = CONFIGS[case]
    pairs = random_pairs(config, leaves)
    if not pairs:
        return  # this architecture has no such projection
    weights = weights_of(config, 0, torch.float32)
    directory = write_adapter(pairs, tmp_path, use_rslora=True)
    want_model = KimiForCausalLM(config).double()
    want = logits(fill(want_model, merged(weights, pairs, rslora=True)))
    base = logits(fill(KimiForCausalLM(config).double(), weights))
    assert (want - base).abs().max() > 1e-3 * want.abs().max(), "an adapter without effect proves nothing"
    verdicts = adapted(config, weights, directory).plan.kda.verdicts
    assert verdicts["single"].ok
    for path in (name for name, verdict in verdicts.items() if verdict.ok):
        model = adapted(config, weights, directory, FusionConfig(kda=path))
        with counters.counting() as ran:
            got = logits(model)
        assert ran["lora"] == 4 * len(pairs)
        assert ran[f"kda.{path}"] == 4 * config.layer_count("kda")
        assert (got - want).abs().max() <= 1e-9 * want.abs().max(), path


REFUSES = {
    ("k3", "q_proj"): {"separate", "split", "whole", "overlap", "fused", "deferred"},
    ("k3", "g_proj"): {"split", "whole", "overlap", "fused", "deferred"},
    ("k3", "f_a_proj"): {"split", "whole", "overlap", "fused", "deferred"},
    ("k3", "b_proj"): {"split", "whole", "overlap", "fused", "deferred"},
    ("k3", "f_b_proj"): {"fused", "deferred"},
    ("k3", "o_proj"): set(),
    ("kl", "v_proj"): {"separate", "split", "whole", "overlap", "fused"},
    ("kl", "g_b_proj"): {"split", "whole", "overlap", "fused"},
    ("kl", "f_b_proj"): {"split", "whole", "overlap", "fused"},
    ("kl", "o_proj"): set(),
}


@pytest.mark.parametrize(("case", "leaf"), REFUSES)
def test_exactly_the_merges_of_an_adapted_member_are_refused(case, leaf, tmp_path):
    config, directory = CONFIGS[case], write_adapter(random_pairs(CONFIGS[case], [leaf]), tmp_path)
    model = adapted(config, weights_of(config, 0, torch.float32), directory, ops={"kda_step": "reference"})
    verdicts = model.plan.kda.verdicts
    refused = {path for path, verdict in verdicts.items() if not verdict.ok}
    never = {"deferred"} if case == "kl" else set()  # a low-rank gate refuses it with or without an adapter
    assert refused == REFUSES[case, leaf] | never
    for path in REFUSES[case, leaf]:
        by = "the decode step" if (path, leaf) == ("deferred", "f_b_proj") else "a merged GEMM"
        assert f"{leaf} carries a LoRA adapter, which {by} would bypass" in verdicts[path].reason
    if "whole" in REFUSES[case, leaf]:
        assert f"whole: {'layer' if 'layer' in model.plan.kda.reason else leaf}" in model.plan.kda.reason
        with pytest.raises(ValueError, match=r"fusion kda=whole cannot be honoured: .*carries a LoRA adapter"):
            adapted(config, {}, tmp_path, FusionConfig(kda="whole"))


def test_mla_alone_leaves_kda_merged(tmp_path):
    config = CONFIGS["k3"]
    mla = [i for i, kind in enumerate(config.layer_kinds) if kind == "mla"]
    pairs = random_pairs(config, ["g_proj"], layers=mla)
    model = adapted(config, weights_of(config, 0, torch.float32), write_adapter(pairs, tmp_path))
    assert (model.plan.kda.path, model.plan.mla.path) == ("whole", "separate")
    assert "merged: g_proj carries a LoRA adapter" in model.plan.mla.reason


def test_one_layer_decides_for_its_kind_and_says_so(tmp_path):
    config = CONFIGS["k3"]
    model = adapted(
        config,
        weights_of(config, 0, torch.float32),
        write_adapter(random_pairs(config, ["g_proj"], layers=[4]), tmp_path),
    )
    assert (model.plan.kda.path, model.plan.mla.path) == ("separate", "merged")
    assert "layer 4: g_proj carries a LoRA adapter" in model.plan.kda.verdicts["split"].reason


@pytest.mark.parametrize("prefix", ["base_model.model.", "base_model.model.language_model."])
@pytest.mark.parametrize("infix", ["", ".default"])
def test_spellings_of_peft(prefix, infix, tmp_path):
    config = CONFIGS["kl"]
    pairs = random_pairs(config, ["q_proj", "o_proj"])
    adapter = read_adapter(write_adapter(pairs, tmp_path, prefix=prefix, infix=infix), config)
    assert set(adapter.modules) == set(pairs)
    assert adapter.scale == 6 / 4
    without = {module.removeprefix("model."): pair for module, pair in pairs.items()}
    again = read_adapter(write_adapter(without, tmp_path / "x", use_rslora=True), config)
    assert set(again.modules) == set(pairs)
    assert again.scale == 6 / 2


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("case", CONFIGS)
def test_ranks_share_an_adapter(case, tp, tmp_path):
    """B is cut like the rows of W and A like its columns: partial sums meet in the all-reduce behind o_proj."""
    config = CONFIGS[case]
    weights, pairs = weights_of(config, 0, torch.float32), random_pairs(config, TARGETS)
    directory = write_adapter(pairs, tmp_path)
    checkpoint = write({n: t.clone() for n, t in weights.items()}, tmp_path / "base")
    board, barrier = {}, threading.Barrier(tp)
    adapter = read_adapter(directory, config)

    def build(rank: int) -> KimiForCausalLM:
        place = Layout(tp=tp).rank(rank)
        comm = ThreadRank(place, board, barrier)
        model = KimiForCausalLM(config, parallel=place, comm=comm, adapted=adapter.modules)
        load_checkpoint(model, checkpoint)
        attach(model, adapter)
        return model

    ranks = [build(rank) for rank in range(tp)]
    want = logits(adapted(config, weights, directory))
    for got in run_ranks(tp, lambda rank: logits(ranks[rank])):
        assert (got - want).abs().max() <= 1e-3 * want.abs().max()
    held = sum(b.numel() for n, b in ranks[0].named_buffers() if n.endswith("adapter.b") or ".adapters." in n)
    assert 0 < held < sum(b.numel() for b in adapted(config, weights, directory).buffers())


def test_over_block_fp8(tmp_path):
    """The base stays in codes; the adapter is added in the model's dtype."""
    config = parse_model_config(raw_fp8("kl"))
    tensors, pairs = official(config), random_pairs(replace(config, fp8=()), ["q_proj", "g_b_proj", "o_proj"])
    base = write(tensors, tmp_path / "base", raw_fp8("kl"))
    model = load_model(base, device="cpu", lora=write_adapter(pairs, tmp_path / "lora"))
    with counters.counting() as ran:
        got = logits(model)
    assert ran["fp8.gemm"] > 0
    assert ran["lora"] == 4 * len(pairs)
    want = logits(
        filled(replace(config, fp8=()), {n: t.float() for n, t in merged(dequantized(tensors), pairs).items()})
    )
    assert (got - want).abs().max() <= 2e-4 * want.abs().max()


def test_the_state_dict_and_updates_know_the_base_alone(tmp_path):
    config = CONFIGS["kl"]
    weights = weights_of(config, 0, torch.float32)
    directory = write_adapter(random_pairs(config, ["q_proj", "g_b_proj"]), tmp_path)
    model = adapted(config, weights, directory)
    assert model.state_dict().keys() == KimiForCausalLM(config).state_dict().keys()
    other = weights_of(config, 1, torch.float32)
    update_weights(model, other.items())
    assert torch.equal(logits(model), logits(adapted(config, other, directory)))


def test_deterministic_mode_keeps_its_promise(tmp_path):
    config = CONFIGS["kl"]
    weights, directory = (
        weights_of(config, 0, torch.float32),
        write_adapter(random_pairs(CONFIGS["kl"], ["g_a_proj"]), tmp_path),
    )
    model = adapted(config, weights, directory, deterministic=True)
    session = Session(model, pages=8)
    alone = session.step((0, PROMPT))[0]
    both = Session(model, pages=8).step((1, PROMPT[:9]), (0, PROMPT))[1]
    assert torch.equal(alone, both)


class TestRefusals:
    config = CONFIGS["kl"]
    Q = "model.layers.0.self_attn.q_proj"

    def refusal(self, directory) -> str:
        with pytest.raises(ValueError, match=r".") as caught:
            read_adapter(directory, self.config)
        assert len(str(caught.value).splitlines()) == 1
        return str(caught.value)

    @pytest.fixture
    def directory(self, tmp_path):
        return write_adapter(random_pairs(self.config, ["q_proj"]), tmp_path)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"peft_type": "IA3"}, "'peft_type' is 'IA3'; accepted: LORA"),
            ({"use_dora": True}, "'use_dora' is True; only False is implemented"),
            ({"bias": "all"}, "'bias' is 'all'; only 'none' is implemented"),
            ({"modules_to_save": ["lm_head"]}, "'modules_to_save' is ['lm_head']; only None"),
            ({"rank_pattern": {"q_proj": 2}}, "'rank_pattern' is {'q_proj': 2}"),
            ({"init_lora_weights": "pissa_niter_4"}, "'init_lora_weights' is 'pissa_niter_4', which changes the base"),
            ({"r": 0}, "'r' is 0; need a whole number from 1"),
            ({"r": True}, "'r' is True"),
            ({"lora_alpha": None}, "'lora_alpha' is None; need a number"),
            ({"lora_alpha": float("nan")}, "'lora_alpha' is nan"),
            ({"target_modules": ["q_proj", "up_proj"]}, "target_modules holds 'up_proj'; accepted are q_proj, k_proj"),
            ({"r": 8}, "lora_A.weight has shape [4, 64], need [8, 64]"),
        ],
        ids=str,
    )
    def test_settings(self, changes, message, tmp_path):
        assert message in self.refusal(write_adapter(random_pairs(self.config, ["q_proj"]), tmp_path, **changes))

    @pytest.mark.parametrize("leaf", ["kv_b_proj"])
    def test_a_projection_that_is_multiplied_in_two_forms(self, leaf, tmp_path):
        directory = write_adapter(random_pairs(self.config, [leaf]), tmp_path, target_modules="all-linear")
        assert "kv_b_proj.lora_A.weight: adapters are accepted on q_proj" in self.refusal(directory)

    def test_another_base_model(self, tmp_path):
        directory = write_adapter(random_pairs(CONFIGS["k3"], ["g_proj"]), tmp_path)
        assert "adapts model.layers.0.self_attn.g_proj, which this model does not have" in self.refusal(directory)
        wider = random_pairs(config_of("kl", hidden_size=96), ["q_proj"])
        assert "q_proj.lora_A.weight has shape [4, 96], need [4, 64]" in self.refusal(
            write_adapter(wider, tmp_path / "x")
        )

    def test_layers_beyond_the_model(self, directory):
        file = directory / "adapter_model.safetensors"
        save_file({n.replace("layers.0", "layers.9"): t for n, t in load_file(file).items()}, file)
        assert "layers.9.self_attn.q_proj, which this model does not have" in self.refusal(directory)

    @pytest.mark.parametrize("gone", ["A", "B"])
    def test_half_a_pair(self, gone, directory):
        file = directory / "adapter_model.safetensors"
        tensors = load_file(file)
        del tensors[f"base_model.model.{self.Q}.lora_{gone}.weight"]
        save_file(tensors, file)
        assert f"but not lora_{gone} of {self.Q}" in self.refusal(directory)

    @pytest.mark.parametrize(
        ("name", "tensor", "message"),
        [
            (
                "base_model.model.lm_head.weight",
                torch.ones(2),
                "unexpected tensor base_model.model.lm_head.weight; need",
            ),
            (f"base_model.model.{Q}.lora_magnitude_vector", torch.ones(2), "unexpected tensor"),
            (f"base_model.model.{Q}.lora_A.default.weight", torch.ones(4, 64), "are the same"),
            (
                f"base_model.model.{Q}.lora_A.weight",
                torch.ones(4, 64, dtype=torch.int8),
                "has dtype I8, need BF16 or F16 or",
            ),
            (
                "base_model.model.model.layers.1.block_sparse_moe.gate.lora_A.weight",
                torch.ones(4, 64),
                "adapters are accepted",
            ),
        ],
    )
    def test_tensors(self, name, tensor, message, directory):
        file = directory / "adapter_model.safetensors"
        save_file(load_file(file) | {name: tensor}, file)
        assert message in self.refusal(directory)

    def test_files(self, directory, tmp_path):
        assert "adapter_config.json: no such file; need a PEFT adapter directory" in self.refusal(tmp_path / "gone")
        (directory / "adapter_model.safetensors").write_bytes(b"x")
        assert "adapter_model.safetensors: cannot be read as a safetensors file" in self.refusal(directory)
        save_file({}, directory / "adapter_model.safetensors")
        assert "holds no tensors" in self.refusal(directory)
        (directory / "adapter_config.json").write_text("{")
        assert "adapter_config.json: not valid JSON" in self.refusal(directory)
        (directory / "adapter_config.json").write_text(json.dumps([1]))
        assert "need a JSON object, found list" in self.refusal(directory)

    def test_values(self, tmp_path):
        pairs = random_pairs(self.config, ["q_proj"])
        pairs[self.Q][1][3, 1] = torch.inf
        base = write(official(self.config), tmp_path / "base", raw_config("kl"))
        with pytest.raises(ValueError, match=r"q_proj.lora_B.weight holds a value that is NaN or infinite"):
            load_model(base, device="cpu", lora=write_adapter(pairs, tmp_path / "lora"))

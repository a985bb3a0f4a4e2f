"""Loading: every spelling and file layout gives the same model, rank by rank, within the memory promised."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from helpers.checkpoints import (
    config_of,
    filled,
    in_memory,
    official,
    raw_config,
    same,
    swapped_ffn,
    weights_of,
    without_model,
    write,
)

from anabranch.config.fusion import FusionConfig
from anabranch.config.hf import load_model_config
from anabranch.config.parallel import ParallelConfig
from anabranch.models.checkpoint import detect_formats, load_checkpoint
from anabranch.models.kimi import KimiForCausalLM
from anabranch.models.load import load_model
from anabranch.models.weights import copy_shard
from anabranch.parallel.layout import Layout

CONFIGS = {
    "kl": config_of("kl"),
    "k3": config_of("k3"),
    "k3-plain": config_of("k3", quantization_config=None),
}


def loaded(config, directory, **kw) -> KimiForCausalLM:
    model = KimiForCausalLM(config, **kw)
    load_checkpoint(model, directory)
    return model


def truth(case: str, dtype: torch.dtype = torch.float32) -> KimiForCausalLM:
    return filled(CONFIGS[case], weights_of(CONFIGS[case], 0, torch.bfloat16), dtype)


class TestSpellings:
    @pytest.mark.parametrize("case", CONFIGS)
    def test_official(self, case, tmp_path):
        directory = write(official(CONFIGS[case]), tmp_path)
        assert same(loaded(CONFIGS[case], directory), truth(case))

    @pytest.mark.parametrize("case", CONFIGS)
    @pytest.mark.parametrize("spell", [without_model, swapped_ffn], ids=lambda f: f.__name__)
    def test_prefixes_and_ffn_names(self, case, spell, tmp_path):
        tensors = official(CONFIGS[case])
        directory = write(spell(tensors), tmp_path)
        assert spell(tensors).keys() != tensors.keys()
        assert same(loaded(CONFIGS[case], directory), truth(case))

    @pytest.mark.parametrize("case", ["kl", "k3-plain"])
    def test_in_memory_names_of_transformers(self, case, tmp_path):
        config = CONFIGS[case]
        tensors = in_memory(official(config), config)
        assert any(name.endswith("mlp.experts.gate_up_proj") for name in tensors)
        assert same(loaded(config, write(tensors, tmp_path)), truth(case))

    def test_in_memory_names_over_ranks(self, tmp_path):
        config, layout = CONFIGS["kl"], Layout(tp=4, ep=2)
        merged = write(in_memory(official(config), config), tmp_path)
        weights = weights_of(config, 0, torch.bfloat16)
        for rank in range(layout.tp):
            got = loaded(config, merged, parallel=layout.rank(rank)).state_dict()
            for name, view in got.items():
                want = torch.zeros_like(view)
                copy_shard(want, weights[name], name, config, layout.rank(rank))
                assert torch.equal(view, want), name

    @pytest.mark.parametrize("shape", [(8,), (1, 1, 8, 1), (128,), (11, 1)], ids=str)
    @pytest.mark.parametrize("rank", range(2))
    def test_a_log_of_any_shape(self, shape, rank, tmp_path):
        config, tensors = CONFIGS["kl"], official(CONFIGS["kl"])
        name = "model.layers.1.self_attn.A_log"
        tensors[name] = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        model = loaded(config, write(tensors, tmp_path), parallel=Layout(tp=2).rank(rank))
        assert model.state_dict()[name].tolist() == [4.0 * rank + i for i in range(4)]

    def test_vision_rotary_and_later_layers_are_counted_not_loaded(self, tmp_path):
        tensors = official(CONFIGS["k3"])
        extra = {
            "vision_tower.patch_embed.pos_emb.weight": torch.ones(2, 2),
            "mm_projector.linear_1.weight": torch.ones(2, 2).to(torch.float8_e4m3fn),
            "mm_projector.post_norm.weight": torch.ones(2),
            "language_model.model.layers.3.self_attn.rotary_emb.inv_freq": torch.ones(4),
            "language_model.model.layers.9.self_attn.q_proj.weight": torch.ones(2, 2),
        }
        model = KimiForCausalLM(CONFIGS["k3"])
        report = load_checkpoint(model, write(tensors | extra, tmp_path))
        assert (report.tensors, report.vision, report.ignored, report.elsewhere) == (len(tensors), 3, 2, 0)
        assert report.bytes == sum(view.nbytes for view in model.state_dict().values())
        assert report.files == 1
        assert same(model, truth("k3"))


class TestFiles:
    @pytest.mark.parametrize("index", [True, False], ids=["index", "no index"])
    def test_shards(self, index, tmp_path):
        directory = write(official(CONFIGS["k3"]), tmp_path, shards=5)
        if not index:
            (directory / "model.safetensors.index.json").unlink()
        assert len(list(directory.glob("*.safetensors"))) == 5
        assert same(loaded(CONFIGS["k3"], directory), truth("k3"))

    def test_a_single_file_goes_before_a_stale_index(self, tmp_path):
        write(official(CONFIGS["kl"], seed=1), tmp_path / "old", shards=2)
        directory = write(official(CONFIGS["kl"]), tmp_path / "new")
        for file in (tmp_path / "old").iterdir():
            file.rename(directory / file.name)
        assert same(loaded(CONFIGS["kl"], directory), truth("kl"))

    @pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.float64], ids=str)
    def test_stored_dtypes(self, stored, tmp_path):
        tensors = {n: t.to(stored) for n, t in official(CONFIGS["kl"]).items()}
        weights = weights_of(CONFIGS["kl"], 0, torch.bfloat16)
        want = filled(CONFIGS["kl"], {n: t.to(stored) for n, t in weights.items()}, torch.bfloat16)
        assert same(loaded(CONFIGS["kl"], write(tensors, tmp_path), dtype=torch.bfloat16), want)

    def test_pads_and_shared_buffers_stay_intact(self, tmp_path):
        model = loaded(CONFIGS["kl"], write(official(CONFIGS["kl"]), tmp_path))
        attention = model.get_submodule("model.layers.0.self_attn")
        pad = attention.in_proj.rows("pad")
        assert pad.numel()
        assert not pad.any()
        assert all(torch.isfinite(p).all() for p in model.parameters())


class TestRanks:
    @pytest.mark.parametrize("layout", [Layout(tp=2, ep=2), Layout(tp=8), Layout(tp=4, dp_attention=2, ep=2)], ids=str)
    def test_ranks_read_their_part(self, layout, tmp_path):
        config = config_of("k3", vocab_size=269)
        directory = write(official(config), tmp_path, shards=2)
        weights = weights_of(config, 0, torch.bfloat16)
        for rank in range(layout.tp):
            model = KimiForCausalLM(config, parallel=layout.rank(rank))
            report = load_checkpoint(model, directory)
            assert report.tensors + report.elsewhere == len(weights)
            assert report.elsewhere == (len(weights) - 618 + 8 * 8 * 6 - 8 * 8 * 6 // layout.ep)
            for name, view in model.state_dict().items():
                want = torch.full_like(view, 7)
                copy_shard(want, weights[name], name, config, layout.rank(rank))
                assert torch.equal(view, want), name

    def test_pipeline_stages_read_their_layers(self, tmp_path):
        config = CONFIGS["kl"]
        directory, whole = write(official(config), tmp_path, shards=6), truth("kl").state_dict()
        seen = set()
        for rank in range(2):
            model = KimiForCausalLM(config, parallel=ParallelConfig(pp_size=2, pp_rank=rank))
            report = load_checkpoint(model, directory)
            views = model.state_dict()
            assert report.files < 6
            assert report.tensors + report.elsewhere == len(whole)
            assert all(torch.equal(view, whole[name]) for name, view in views.items())
            assert not seen & views.keys()
            seen |= views.keys()
        assert seen == whole.keys()


class TestProgress:
    def test_silent_without_a_terminal(self, tmp_path, capfd):
        load_checkpoint(KimiForCausalLM(CONFIGS["kl"]), write(official(CONFIGS["kl"]), tmp_path))
        assert capfd.readouterr() == ("", "")

    def test_bar_on_stderr_when_asked(self, tmp_path, capfd):
        load_checkpoint(KimiForCausalLM(CONFIGS["kl"]), write(official(CONFIGS["kl"]), tmp_path), progress=True)
        out, err = capfd.readouterr()
        assert out == ""
        assert "loading weights" in err


class TestLoadModel:
    @pytest.mark.parametrize(("lie", "case"), [("mxfp4", "k3-plain"), ("plain", "k3")])
    def test_files_decide_the_expert_format(self, lie, case, tmp_path):
        raw = raw_config("k3") if lie == "mxfp4" else raw_config("k3", quantization_config=None)
        directory = write(official(CONFIGS[case]), tmp_path, raw)
        held = CONFIGS[case].expert_format
        assert detect_formats(directory, load_model_config(directory)).expert_format == held != lie
        model = load_model(directory, device="cpu")
        assert model.config == replace(CONFIGS[case], expert_format=held)
        assert same(model, truth(case))

    def test_dtype(self, tmp_path):
        directory = write(official(CONFIGS["kl"]), tmp_path, raw_config("kl"))
        auto = load_model(directory, device="cpu")
        assert (auto.dtype, auto.training) == (torch.float32, False)
        assert not any(parameter.requires_grad for parameter in auto.parameters())
        assert same(load_model(directory, device="cpu", dtype="bfloat16"), truth("kl", torch.bfloat16))

    def test_parallel_fusion_and_eps_are_handed_on(self, tmp_path):
        directory = write(official(CONFIGS["kl"]), tmp_path, raw_config("kl"))
        place = Layout(tp=2).rank(1)
        model = load_model(directory, device="cpu", parallel=place, fusion=FusionConfig(kda="split"), mla_norm_eps=1e-5)
        assert (model.parallel, model.plan.kda.path, model.config.mla.norm_eps) == (place, "split", 1e-5)
        assert model.state_dict()["lm_head.weight"].shape == (136, 64)

    def test_dummy_needs_only_a_config(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps(raw_config("k3")))
        a = load_model(tmp_path, device="cpu", load_format="dummy", seed=3)
        b = load_model(tmp_path / "config.json", device="cpu", load_format="dummy", seed=3)
        assert same(a, b)
        assert a.config.expert_format == "mxfp4"

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            ({"dtype": "fp8"}, "dtype='fp8': accepted are auto, float32, bfloat16, float16"),
            ({"device": "tpu"}, "device='tpu': accepted are auto, cpu, cuda, cuda:N"),
            ({"device": "cuda:x"}, "device='cuda:x': accepted are auto, cpu, cuda, cuda:N"),
            ({"device": "cuda:99"}, "device='cuda:99': this machine has . CUDA devices"),
            ({"load_format": "gguf"}, "load_format='gguf': accepted are auto, safetensors, dummy"),
        ],
        ids=str,
    )
    def test_unknown_options(self, option, message, tmp_path):
        directory = write(official(CONFIGS["kl"]), tmp_path, raw_config("kl"))
        with pytest.raises(ValueError, match=f"^{message}$"):
            load_model(directory, **({"device": "cpu"} | option))


@pytest.fixture(scope="module")
def theirs():
    """A tiny random model of transformers' own."""
    transformers = pytest.importorskip("transformers")
    raw = raw_config("kl", num_experts=4, head_dim=None, rope_scaling=None)
    torch.manual_seed(0)
    model = transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**raw))
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_()
    return model


def expected(name: str, live: dict[str, torch.Tensor]) -> torch.Tensor:
    """The official tensor, cut by hand from transformers' live ones."""
    name = name.replace("block_sparse_moe", "mlp")
    if found := re.search(r"([qkv])_conv1d", name):
        return live[name.replace(found[0], "conv1d")].chunk(3)["qkv".index(found[1])]
    if found := re.search(r"experts\.(\d+)\.w([123])\.weight", name):
        stack, expert = name.removesuffix(found[0]) + "experts.", int(found[1])
        if found[2] == "2":
            return live[f"{stack}down_proj"][expert]
        return live[f"{stack}gate_up_proj"][expert].chunk(2)[found[2] == "3"]
    name = re.sub(r"self_attn\.(f_a_proj|f_b_proj|dt_bias|A_log)", r"self_attn.forget_gate.\1", name)
    return live[name].flatten() if name.endswith("A_log") else live[name]


@pytest.mark.parametrize("how", ["save_pretrained", "live state dict"])
def test_saved_by_transformers(how, theirs, tmp_path):
    live = theirs.state_dict()
    theirs.config.save_pretrained(tmp_path)
    if how == "save_pretrained":
        theirs.save_pretrained(tmp_path)
    else:
        write({name: tensor.clone() for name, tensor in live.items()}, tmp_path)
    ours = load_model(tmp_path, device="cpu", dtype="float32").state_dict()
    for name, view in ours.items():
        assert torch.equal(view, expected(name, live)), name


PEAK = """
import re, sys
from pathlib import Path
import torch
from anabranch.config.hf import load_model_config
from anabranch.models.checkpoint import load_checkpoint
from anabranch.models.kimi import KimiForCausalLM

assert not {"rich", "transformers"} & sys.modules.keys(), "imported although not needed"
model = KimiForCausalLM(load_model_config(sys.argv[1]), dtype=torch.bfloat16)
resident = lambda key: 1024 * int(re.search(rf"{key}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
torch.aminmax(torch.zeros(1 << 20, dtype=torch.bfloat16))
before = resident("VmRSS")
report = load_checkpoint(model, sys.argv[1])
print(report.bytes, resident("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_peak_memory_is_the_model_and_one_file(tmp_path):
    changes = {"hidden_size": 512, "intermediate_size": 2048, "moe_intermediate_size": 512, "vocab_size": 16384}
    directory = write(official(config_of("kl", **changes)), tmp_path, raw_config("kl", **changes), shards=6)
    biggest = max(file.stat().st_size for file in directory.glob("*.safetensors"))
    done = subprocess.run([sys.executable, "-c", PEAK, str(directory)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    weights, peak = map(int, done.stdout.split())
    assert weights > 100e6
    # a second copy of the model, or two files at once, would not fit
    assert peak < weights + biggest + 8e6
    assert biggest + 8e6 < 0.5 * weights

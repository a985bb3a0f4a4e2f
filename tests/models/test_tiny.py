"""Tiny checkpoints: the released format in small, the same bytes for the same arguments."""

import json

import pytest
import torch
import typer
from helpers.checkpoints import raw_config, read
from safetensors import safe_open
from typer.testing import CliRunner

from anabranch.cli.init_checkpoint import init_checkpoint as command
from anabranch.config.hf import load_model_config
from anabranch.models.chat import ChatRenderer
from anabranch.models.inventory import checkpoint_tensors
from anabranch.models.load import load_model
from anabranch.models.tiny import SPECIALS, init_checkpoint, tiny_config
from anabranch.models.tokenizer import Tokenizer
from anabranch.ops.fp8_linear.reference import dequantize
from anabranch.parallel.layout import Layout

LINEAR = ("_proj", "_with_mqa")
ARCHITECTURES = {"kl": "kimi_linear", "k3": "kimi_k3"}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def tiny(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    init_checkpoint(request.param, directory)
    return request.param, directory


def test_official_names_shapes_and_dtypes(tiny):
    architecture, directory = tiny
    config = load_model_config(directory)
    prefix = "language_model." if architecture == "k3" else ""
    found = {name: (tuple(t.shape), t.dtype) for name, t in read(directory).items()}
    assert found == {prefix + name: tuple(spec) for name, spec in checkpoint_tensors(config).items()}
    with safe_open(directory / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_config_has_the_family_s_features(tiny):
    architecture, directory = tiny
    config = load_model_config(directory)
    assert config.architecture == ARCHITECTURES[architecture]
    assert config.layer_kinds[-1] == "mla"
    assert config.layers >= (9 if architecture == "k3" else 6)
    assert config.moe_layers == (False, *[True] * (config.layers - 1))
    assert config.moe is not None
    if architecture == "kl":
        assert (config.expert_format, config.mla.q_lora_rank, config.kda.full_rank_gate) == ("plain", None, False)
        assert (config.kda.gate_lower_bound, config.attn_res_block, config.activation.name) == (None, None, "silu")
        return
    assert (config.expert_format, config.attn_res_block, config.moe.shared_experts) == ("mxfp4", 3, 2)
    assert (config.mla.output_gate, config.kda.full_rank_gate, config.kda.gate_lower_bound) == (True, True, -5.0)
    assert (config.activation.name, config.activation.linear_beta) == ("situ", 25.0)
    assert config.moe.latent_norm
    assert config.moe.latent_size != config.hidden_size


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_power_of_two_up_to_eight_ranks_is_legal(tiny, tp):
    config = load_model_config(tiny[1])
    for ep in {1, tp}:
        Layout(tp=tp, ep=ep).check(config)


def test_tokenizer_chat_and_stop_id(tiny):
    architecture, directory = tiny
    config, tokenizer = load_model_config(directory), Tokenizer.load(directory)
    assert tokenizer.vocab_size == config.vocab_size == 272
    assert config.vocab_size % 16 == 0
    stop = "<|im_end|>" if architecture == "kl" else "<|end_of_msg|>"
    assert config.eos_ids == (tokenizer.special_ids[stop],)
    assert config.bos_id == tokenizer.bos_id == tokenizer.special_ids["[BOS]"]
    assert config.pad_id == tokenizer.special_ids["[PAD]"]
    assert tokenizer.decode(tokenizer.encode("naïve 你好\n")) == "naïve 你好\n"
    messages = [{"role": "user", "content": "hi"}]
    ids = ChatRenderer.load(directory, tokenizer, config.architecture).render(messages)
    assert config.eos_ids[0] in ids
    assert (directory / "chat_template.jinja").exists() == (architecture == "kl")
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation["eos_token_id"] == config.eos_ids[0]


def test_kimi_k3_keeps_its_markers_in_text(tmp_path):
    flags = dict(SPECIALS["k3"])
    assert [flags[name] for name in ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")] == [False] * 3 + [True]


@pytest.mark.parametrize("shards", [1, 3])
def test_same_arguments_same_bytes(shards, tmp_path):
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        init_checkpoint("k3", tmp_path / name, seed=seed, shards=shards)
    contents = {
        name: {file.name: file.read_bytes() for file in sorted((tmp_path / name).iterdir())} for name in ("a", "b", "c")
    }
    assert contents["a"] == contents["b"]
    assert contents["a"].keys() == contents["c"].keys()
    different = {name for name in contents["a"] if contents["a"][name] != contents["c"][name]}
    assert different == {name for name in contents["a"] if name.endswith(".safetensors")}


def test_shards_hold_the_same_tensors_as_one_file(tmp_path):
    init_checkpoint("kl", tmp_path / "one")
    init_checkpoint("kl", tmp_path / "four", shards=4)
    one, four = read(tmp_path / "one"), read(tmp_path / "four")
    assert one.keys() == four.keys()
    assert all(torch.equal(one[name], four[name]) for name in one)
    index = json.loads((tmp_path / "four" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in one.values())
    assert len(set(index["weight_map"].values())) == 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype(dtype, tmp_path):
    init_checkpoint("kl", tmp_path, dtype=dtype)
    assert load_model_config(tmp_path).dtype == dtype
    tensors = read(tmp_path)
    assert tensors["lm_head.weight"].dtype == getattr(torch, dtype)
    assert tensors["model.layers.0.self_attn.dt_bias"].dtype == torch.float32


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fp8(architecture, tmp_path):
    """The config names exactly the projections that the files hold as codes, and the rest is as without."""
    init_checkpoint(architecture, tmp_path / "plain")
    init_checkpoint(architecture, tmp_path / "fp8", fp8=True)
    plain, coded, config = read(tmp_path / "plain"), read(tmp_path / "fp8"), load_model_config(tmp_path / "fp8")
    prefix = "language_model." if architecture == "k3" else ""
    codes = {n.removesuffix(".weight") for n, t in coded.items() if t.dtype == torch.float8_e4m3fn}
    assert codes == {prefix + name for name in config.fp8}
    attention = {n.removesuffix(".weight") for n in plain if ".self_attn." in n and n.split(".")[-2].endswith(LINEAR)}
    assert codes == attention
    scales = {f"{module}.weight_scale_inv" for module in codes}
    assert coded.keys() == plain.keys() | scales
    for name, tensor in plain.items():
        if name.removesuffix(".weight") in codes:
            back = dequantize(coded[name], coded[f"{name}_scale_inv"])
            assert (back - tensor.float()).abs().max() <= tensor.float().abs().max() / 15
        else:
            assert torch.equal(tensor, coded[name])


def test_values_reach_gates_and_caps(tmp_path):
    init_checkpoint("k3", tmp_path)
    tensors = read(tmp_path)
    layer = "language_model.model.layers.1."
    assert tensors[f"{layer}self_attn.A_log"].shape == (128,)
    assert tensors[f"{layer}self_attn.A_log"][8:].std() > 0.3  # wrong heads would show
    assert tensors[f"{layer}mlp_res_proj.weight"].float().std() > 0.2
    assert tensors[f"{layer}block_sparse_moe.gate.e_score_correction_bias"].std() > 0.1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"architecture": "gpt"}, "architecture='gpt': accepted are kl, k3"),
        ({"dtype": "int8"}, "dtype='int8': accepted are float32, bfloat16, float16"),
        ({"shards": 0}, "shards=0: need 1..233"),
        ({"shards": 234}, "shards=234: need 1..233"),
    ],
    ids=str,
)
def test_wrong_arguments(wrong, message, tmp_path):
    with pytest.raises(ValueError, match=f"^{message}$"):
        init_checkpoint(**({"architecture": "kl", "out_dir": tmp_path} | wrong))
    assert not list(tmp_path.glob("*.safetensors"))


def test_config_is_a_fresh_copy():
    tiny_config("k3")["text_config"]["vocab_size"] = 5
    assert raw_config("k3")["text_config"]["vocab_size"] == 272


class TestCommand:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_default_directory(self, architecture, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        command(architecture)
        assert load_model(tmp_path / f"tiny-{architecture}", device="cpu").config.layers
        assert capsys.readouterr().out.startswith(f"wrote tiny-{architecture} (")

    def test_does_not_overwrite_without_force(self, tmp_path):
        command("kl", tmp_path / "x", shards=3)
        before = {file.name: file.read_bytes() for file in (tmp_path / "x").iterdir()}
        with pytest.raises(ValueError, match="x: directory is not empty; --force writes into it all the same"):
            command("kl", tmp_path / "x", seed=1)
        assert before == {file.name: file.read_bytes() for file in (tmp_path / "x").iterdir()}
        command("kl", tmp_path / "x", seed=1, force=True)
        assert [file.name for file in (tmp_path / "x").glob("*.safetensors*")] == ["model.safetensors"]
        assert load_model(tmp_path / "x", device="cpu")

    def test_options(self, tmp_path):
        app = typer.Typer()
        app.command()(command)
        options = ["--seed", "3", "--dtype", "float32", "--shards", "2", "--fp8", "--out", str(tmp_path / "x")]
        result = CliRunner().invoke(app, ["k3", *options])
        assert result.exit_code == 0, result.output
        init_checkpoint("k3", tmp_path / "y", seed=3, dtype="float32", shards=2, fp8=True)
        files = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in "xy"]
        assert files[0] == files[1]

    def test_an_existing_empty_directory_is_fine_and_a_file_is_not(self, tmp_path):
        (tmp_path / "empty").mkdir()
        command("kl", tmp_path / "empty")
        (tmp_path / "file").write_text("x")
        with pytest.raises(ValueError, match="file: is a file; need a directory"):
            command("kl", tmp_path / "file", force=True)

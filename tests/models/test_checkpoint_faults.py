"""Every fault of a checkpoint is one line that names the tensor and the file, and nothing is loaded."""

import json
from dataclasses import replace

import pytest
import torch
from helpers.checkpoints import config_of, official, raw_config, write
from safetensors.torch import load_file, save_file

from anabranch.models.checkpoint import load_checkpoint
from anabranch.models.kimi import KimiForCausalLM
from anabranch.models.load import load_model
from anabranch.ops.fp8_linear.reference import quantize

KL, K3 = config_of("kl"), config_of("k3")
Q = "model.layers.0.self_attn.q_proj.weight"
EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.3.w1"


@pytest.fixture
def tensors():
    return official(KL)


def complaint(config, directory, **kw) -> str:
    """The one line that loading fails with; whatever could be checked before reading left the model untouched."""
    model = KimiForCausalLM(config, **kw)
    with pytest.raises(ValueError, match=r".") as caught:
        load_checkpoint(model, directory)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.startswith(str(directory)), message
    if "NaN" not in message:
        held = (view.float() for view in model.state_dict().values() if view.is_floating_point())
        assert all(torch.isnan(view).all() for view in held)
    return message.removeprefix(str(directory)).lstrip("/")


class TestTensors:
    def test_missing(self, tensors, tmp_path):
        for name in (Q, "lm_head.weight", "model.layers.2.self_attn.A_log", "model.norm.weight"):
            del tensors[name]
        assert complaint(KL, write(tensors, tmp_path)) == (
            f": 4 of 233 tensors are missing: {Q}, model.layers.2.self_attn.A_log, model.norm.weight and 1 more"
        )

    def test_missing_stack_of_experts(self, tensors, tmp_path):
        gone = [n for n in tensors if "layers.1.block_sparse_moe.experts." in n]
        tensors = {n: t for n, t in tensors.items() if n not in gone}
        assert complaint(KL, write(tensors, tmp_path)).startswith(": 24 of 233 tensors are missing: " + gone[0])

    def test_unexpected(self, tensors, tmp_path):
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(128)
        tensors["model.layers.0.self_attn.z_proj.weight"] = torch.zeros(128)
        message = complaint(KL, write(tensors, tmp_path))
        assert message == "model.safetensors: unexpected tensor model.layers.0.self_attn.q_proj.bias and 1 more"

    def test_vision_is_unexpected_in_kimi_linear(self, tensors, tmp_path):
        tensors["vision_tower.x"] = torch.zeros(1)
        assert complaint(KL, write(tensors, tmp_path)) == "model.safetensors: unexpected tensor vision_tower.x"

    @pytest.mark.parametrize(
        ("name", "shape", "needed"),
        [
            (Q, (64, 128), "[128, 64]"),
            ("model.layers.0.self_attn.k_conv1d.weight", (128, 4), "[128, 1, 4]"),
            ("model.layers.0.self_attn.A_log", (7,), "[1, 1, 8, 1]"),
            ("model.layers.0.self_attn.A_log", (4, 2), "[1, 1, 8, 1]"),
            ("model.norm.weight", (), "[64]"),
        ],
    )
    def test_wrong_shape(self, name, shape, needed, tensors, tmp_path):
        tensors[name] = torch.zeros(shape)
        message = complaint(KL, write(tensors, tmp_path))
        assert message == f"model.safetensors: tensor {name} has shape {list(shape)}, need {needed}"

    def test_wrong_shape_of_a_stack(self, tensors, tmp_path):
        name = "model.layers.1.mlp.experts.gate_up_proj"
        tensors = {n: t for n, t in tensors.items() if "layers.1.block_sparse_moe.experts" not in n}
        tensors[name] = torch.zeros(8, 32, 64)
        message = complaint(KL, write(tensors, tmp_path))
        assert message == f"model.safetensors: tensor {name} has shape [8, 32, 64], need [8, 64, 64]"

    @pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
    def test_wrong_kind(self, dtype, tensors, tmp_path):
        tensors[Q] = torch.zeros(128, 64, dtype=dtype)
        message = complaint(KL, write(tensors, tmp_path))
        assert message.startswith(f"model.safetensors: tensor {Q} has dtype ")
        assert message.endswith("need BF16 or F16 or F32 or F64")

    def test_wrong_kind_of_codes(self, tmp_path):
        tensors = official(K3)
        tensors[f"{EXPERT}.weight_scale"] = torch.ones(256, 1)
        message = complaint(K3, write(tensors, tmp_path))
        assert message == f"model.safetensors: tensor {EXPERT}.weight_scale has dtype F32, need U8"

    def test_two_spellings_of_one_tensor(self, tensors, tmp_path):
        tensors["model.layers.0.block_sparse_moe.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].clone()
        message = complaint(KL, write(tensors, tmp_path))
        assert message.startswith("model.safetensors: tensor model.layers.0.")
        assert "block_sparse_moe.up_proj" in message
        assert "mlp.up_proj" in message


class TestQuantisation:
    @pytest.mark.parametrize("kind", ["weight_scale", "weight_scale_inv"])
    def test_scale_beside_a_plain_projection(self, kind, tensors, tmp_path):
        name = Q.replace("weight", kind)
        tensors[name] = torch.ones(1, 1)
        assert complaint(KL, write(tensors, tmp_path)) == f"model.safetensors: unexpected tensor {name}"

    def test_quantised_activations(self, tensors, tmp_path):
        name = Q.replace("weight", "input_scale")
        tensors[name] = torch.ones(())
        message = complaint(KL, write(tensors, tmp_path))
        assert message == f"model.safetensors: tensor {name} quantises activations; need weight-only block-FP8"

    @pytest.mark.parametrize("name", [Q, "model.layers.1.block_sparse_moe.experts.0.w1.weight"])
    def test_fp8_where_the_model_was_built_plain(self, name, tensors, tmp_path):
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        message = complaint(KL, write(tensors, tmp_path))
        assert message == f"model.safetensors: tensor {name} has dtype F8_E4M3, need BF16 or F16 or F32 or F64"

    @pytest.fixture
    def coded(self, tensors):
        """A model that expects one projection in block-FP8, and a checkpoint that has it."""
        codes, scale = quantize(tensors[Q])
        tensors |= {Q: codes, f"{Q}_scale_inv": scale}
        return replace(KL, fp8=(Q.removesuffix(".weight"),)), tensors

    def test_plain_where_the_model_was_built_fp8(self, coded, tmp_path):
        config, tensors = coded
        del tensors[f"{Q}_scale_inv"]
        tensors[Q] = torch.zeros(128, 64)
        message = complaint(config, write(tensors, tmp_path))
        assert message == f"model.safetensors: tensor {Q} has dtype F32, need F8_E4M3"

    def test_codes_without_scales(self, coded, tmp_path):
        config, tensors = coded
        del tensors[f"{Q}_scale_inv"]
        message = complaint(config, write(tensors, tmp_path))
        assert message == f"model.safetensors: tensor {Q} is there, but not its other half {Q}_scale_inv"

    @pytest.mark.parametrize("shape", [(), (1,), (128, 1), (2, 1), (1, 1, 2, 1)], ids=str)
    def test_scales_that_are_not_of_blocks(self, shape, coded, tmp_path):
        config, tensors = coded
        tensors[f"{Q}_scale_inv"] = torch.ones(shape)
        message = complaint(config, write(tensors, tmp_path))
        assert message == f"model.safetensors: tensor {Q}_scale_inv has shape {list(shape)}, need [1, 1]"

    def test_both_spellings_of_a_scale(self, coded, tmp_path):
        config, tensors = coded
        tensors[f"{Q}_scale"] = torch.ones(1, 1)
        message = complaint(config, write(tensors, tmp_path))
        assert "is in model.safetensors as well, under the name" in message
        assert f"{Q}_scale_inv" in message

    def test_e5m2_codes(self, coded, tmp_path):
        config, tensors = coded
        tensors[Q] = torch.zeros(128, 64, dtype=torch.float8_e5m2)
        message = complaint(config, write(tensors, tmp_path))
        assert message == f"model.safetensors: tensor {Q} has dtype F8_E5M2, need F8_E4M3"

    @pytest.mark.parametrize("code", [127, 255])
    def test_nan_codes(self, code, coded, tmp_path):
        config, tensors = coded
        tensors[Q].view(torch.uint8)[5, 7] = code
        message = complaint(config, write(tensors, tmp_path))
        assert message == f"model.safetensors: tensor {Q} has 1 values that are NaN or infinite as float8_e4m3fn"

    @pytest.mark.parametrize("code", [126, 254])
    def test_the_largest_codes_pass(self, code, coded, tmp_path):
        config, tensors = coded
        tensors[Q].view(torch.uint8)[5, 7] = code
        load_checkpoint(KimiForCausalLM(config), write(tensors, tmp_path))

    def test_infinite_scale(self, coded, tmp_path):
        config, tensors = coded
        tensors[f"{Q}_scale_inv"][0, 0] = torch.inf
        message = complaint(config, write(tensors, tmp_path))
        assert message == f"model.safetensors: tensor {Q}_scale_inv has 1 values that are NaN or infinite as float32"

    @pytest.mark.parametrize(("there", "gone"), [("packed", "scale"), ("scale", "packed")])
    def test_half_of_an_mxfp4_pair(self, there, gone, tmp_path):
        tensors = official(K3)
        del tensors[f"{EXPERT}.weight_{gone}"]
        other = f"{EXPERT}.weight_{gone}".removeprefix("language_model.")
        assert complaint(K3, write(tensors, tmp_path)) == (
            f"model.safetensors: tensor {EXPERT}.weight_{there} is there, but not its other half {other}"
        )

    def test_experts_in_another_format_than_the_model(self, tmp_path):
        plain = config_of("k3", quantization_config=None)
        message = complaint(plain, write(official(K3), tmp_path))
        assert message == ": the experts are mxfp4, but the model was built for plain ones"


class TestValues:
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("name", [Q, "model.layers.1.self_attn.A_log", "model.embed_tokens.weight"])
    def test_nan_and_infinity(self, name, value, tensors, tmp_path):
        tensors[name].flatten()[[1, 5, -1] if tensors[name].numel() > 8 else [1, 5, 7]] = value
        message = complaint(KL, write(tensors, tmp_path))
        assert message == f"model.safetensors: tensor {name} has 3 values that are NaN or infinite as float32"

    def test_several(self, tensors, tmp_path):
        for name in (Q, "model.norm.weight"):
            tensors[name].flatten()[0] = float("nan")
        directory = write(tensors, tmp_path, shards=3)
        message = complaint(KL, directory)
        assert message.startswith(f"model-00001-of-00003.safetensors: tensor {Q} has 1 values")

    def test_overflow_of_the_model_s_dtype(self, tensors, tmp_path):
        tensors[Q] = torch.full((128, 64), 1e5)
        message = complaint(KL, write(tensors, tmp_path), dtype=torch.float16)
        assert message == f"model.safetensors: tensor {Q} has 8192 values that are NaN or infinite as float16"

    def test_largest_finite_values_pass(self, tensors, tmp_path):
        tensors[Q] = torch.full((128, 64), torch.finfo(torch.float32).max)
        tensors[Q][0] *= -1
        load_checkpoint(KimiForCausalLM(KL), write(tensors, tmp_path))

    def test_nan_scale(self, tmp_path):
        tensors = official(K3)
        tensors[f"{EXPERT}.weight_scale"][3, 0] = 255
        tensors[f"{EXPERT}.weight_packed"][3, 0] = 255
        message = complaint(K3, write(tensors, tmp_path))
        assert message == (
            f"model.safetensors: tensor {EXPERT}.weight_scale has 1 values that are NaN or infinite as an MXFP4 scale"
        )


class TestFiles:
    @pytest.fixture
    def sharded(self, tensors, tmp_path):
        return write(tensors, tmp_path, raw_config("kl"), shards=3)

    @pytest.mark.parametrize("kept", [0, 5, 1000, -1])
    def test_truncated(self, kept, sharded):
        file = sharded / "model-00002-of-00003.safetensors"
        file.write_bytes(file.read_bytes()[:kept])
        message = complaint(KL, sharded)
        assert message.startswith("model-00002-of-00003.safetensors: cannot be read as a safetensors file (")

    def test_not_safetensors(self, sharded):
        (sharded / "model-00002-of-00003.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n" * 9)
        assert complaint(KL, sharded).startswith("model-00002-of-00003.safetensors: cannot be read as")

    def test_index_names_a_missing_file(self, sharded):
        (sharded / "model-00003-of-00003.safetensors").unlink()
        message = complaint(KL, sharded)
        assert message.startswith("model.safetensors.index.json: puts tensor model.")
        assert message.endswith(" in model-00003-of-00003.safetensors, which does not exist")

    def test_index_puts_a_tensor_in_the_wrong_file(self, sharded):
        index = sharded / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        content["weight_map"][Q] = "model-00002-of-00003.safetensors"
        index.write_text(json.dumps(content))
        assert complaint(KL, sharded) == (
            f"model.safetensors.index.json: puts tensor {Q} in model-00002-of-00003.safetensors, which lacks it"
        )

    @pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
    def test_malformed_index(self, content, sharded):
        (sharded / "model.safetensors.index.json").write_text(content)
        assert complaint(KL, sharded).startswith("model.safetensors.index.json: ")

    @pytest.mark.parametrize("index", [True, False])
    def test_tensor_in_two_shards(self, index, sharded):
        if not index:
            (sharded / "model.safetensors.index.json").unlink()
        first, last = (sharded / f"model-0000{i}-of-00003.safetensors" for i in (1, 3))
        save_file(load_file(last) | {Q: load_file(first)[Q]}, last)
        message = complaint(KL, sharded)
        assert message == f"{last.name}: tensor {Q} is in {first.name} as well"

    def test_no_weights(self, tmp_path):
        assert complaint(KL, tmp_path) == ": no safetensors file; need model.safetensors or shards of it"

    def test_no_directory(self, tmp_path):
        assert complaint(KL, tmp_path / "gone") == ": no such directory; need a local checkpoint directory"

    def test_load_model_returns_nothing_either(self, sharded):
        (sharded / "model-00003-of-00003.safetensors").unlink()
        with pytest.raises(ValueError, match="which does not exist"):
            load_model(sharded, device="cpu")

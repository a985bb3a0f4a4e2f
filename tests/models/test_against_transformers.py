"""An outside witness: the Kimi-Linear of the transformers library, its checkpoint file and its own `generate`."""

from pathlib import Path

import pytest
import torch
from helpers.oracle import Session
from transformers import AutoModelForCausalLM, KimiLinearConfig

from anabranch.config.fusion import FusionConfig
from anabranch.fusion.plan import EAGER
from anabranch.models.load import load_model

PROMPTS = [[5, 17, 3, 88, 41, 2, 9], [1], [(13 * i + 7) % 96 for i in range(70)]]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, torch.nn.Module]:
    """A checkpoint written by `save_pretrained` and the model that wrote it, with weights that exercise the gates."""
    torch.manual_seed(7)
    config = KimiLinearConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        num_experts_per_tok=2,
        num_local_experts=8,
        n_shared_experts=1,
        linear_head_dim=16,
        linear_num_heads=4,
        layer_types=["linear_attention"] * 3 + ["full_attention", "linear_attention", "full_attention"],
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for name, p in model.named_parameters():
        if "norm" in name:
            p.data = 1.0 + 0.2 * torch.randn_like(p)
        elif name.endswith("A_log"):
            p.data = torch.log(torch.empty_like(p).uniform_(1, 16))
        elif name.endswith("dt_bias"):
            p.data = torch.randn_like(p) - 3.0
        elif p.dim() > 1:
            p.data = torch.randn_like(p) * 1.6 / p.shape[-1] ** 0.5
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.data = torch.randn_like(buffer) * 0.3
    path = tmp_path_factory.mktemp("transformers")
    model.save_pretrained(path)
    return path, model


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
@pytest.mark.parametrize("fusion", ["separate", "split", "whole"])
def test_same_greedy_tokens_and_logits(written, prompt, fusion):
    path, theirs = written
    ours = load_model(path, dtype="float32", device="cpu", fusion=FusionConfig(kda=fusion))
    assert ours.model.layers["0"].self_attn.prologue.choose(1, EAGER).name == fusion
    count = 64
    out = theirs.generate(
        torch.tensor([prompt]),
        max_new_tokens=count,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    want = out.sequences[0, len(prompt) :].tolist()
    session, got = Session(ours), []
    logits = session.step((0, prompt))[0][-1]
    for step in range(count):
        assert (logits - out.logits[step][0]).abs().max() < 1e-3, f"logits of token {step}"
        got.append(int(logits.argmax()))
        logits = session.step((0, [got[-1]]), decodes=1)[0][-1]
    assert got == want

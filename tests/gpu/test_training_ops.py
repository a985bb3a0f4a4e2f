"""What a GPU trains with: the recurrence against the fp32 reference, compiled operations against eager ones."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from training.config import small_config
from training.model import Trainable
from training.ops import training_ops

from anabranch.config.hf import parse_model_config

pytest.importorskip("fla")
ROWS, LENGTH, HEADS, DIM = 2, 200, 4, 64


def test_the_recurrence_and_its_gradients():
    config = parse_model_config(small_config())
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (ROWS * LENGTH, HEADS, DIM)
    q, k, v, up = (torch.randn(shape, device="cuda", generator=generator) for _ in range(4))
    q, k, v = (t.bfloat16().float() for t in (q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True), v))
    # down to the bound, where exponents are largest
    g = -5 * torch.sigmoid(3 * torch.randn(shape, device="cuda", generator=generator))
    beta = torch.rand(shape[:2], device="cuda", generator=generator)
    found = []
    for fla in (True, False):
        inputs = [t.clone().requires_grad_() for t in (q, k, v, g, beta)]
        run = training_ops(config, ROWS, LENGTH, fla=fla).kda_prefill
        o = run(inputs[0], inputs[1], inputs[2].bfloat16() if fla else inputs[2], *inputs[3:], None, None, None)
        (o.float() * up).sum().backward()
        found.append([o.float().detach(), *(t.grad for t in inputs)])
    for name, got, want in zip(("o", "q", "k", "v", "g", "beta"), *found, strict=True):
        assert torch.isfinite(got).all(), name
        assert (got - want).norm() < 2e-2 * want.norm(), name


def test_compiled_operations_give_the_same_loss_and_gradients():
    """bf16 throughout, with eager or compiled elementwise operations; all experts are chosen, so no choice can flip."""
    raw = small_config()
    raw["text_config"]["num_experts_per_token"] = raw["text_config"]["num_experts"]
    config = parse_model_config(raw)
    tokens = torch.randint(0, 256, (2, 128), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    found = []
    for compiled in (True, False):
        model = Trainable(config, 2, 128, dtype=torch.bfloat16, device="cuda", compiled=compiled, fla=True)
        model.initialise(0)
        loss = torch.nn.functional.cross_entropy(model(tokens)[:-1], tokens.flatten()[1:])
        loss.backward()
        found.append((loss.item(), model.lm_head.weight.grad.float(), model.model.embed_tokens.weight.grad.float()))
    (loss, *got), (right, *want) = found
    assert abs(loss - right) < 1e-2
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() < 0.1 * b.norm()

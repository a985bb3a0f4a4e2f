"""A model whose prefill kernel is fed by the producer layouts answers as with the chain of operations."""

import pytest
import torch
from helpers.oracle import Session, engine_model
from helpers.ref_tiny import kimi_k3_tiny, kimi_linear_tiny, random_weights

TINY = {"kl": kimi_linear_tiny(layers=4, kda_layers=(1, 2, 3), full_layers=(4,)), "k3": kimi_k3_tiny()}


def run(model) -> torch.Tensor:
    """Logits of two prompts in ragged pieces, of a mixed pass, and of decode tokens."""
    session, out = Session(model), []
    out += session.step((0, [3, 1, 4, 1, 5]), (1, [9, 2]))
    out += session.step((0, [6]), (1, [5, 3, 5, 8]), decodes=1)
    out += session.step((0, [2]), (1, [7]), decodes=2)
    return torch.cat(out)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("deterministic", [False, True])
def test_logits_are_those_of_the_chain(name, deterministic):
    """Chunked prompts, then decode tokens: in deterministic mode bit for bit."""
    config, logits = TINY[name], {}
    weights = random_weights(config, 1)
    wish = "deterministic" if deterministic else "reference"
    for ops in ({}, {"kda_inputs": wish}):
        model = engine_model(config, weights, ops=ops, deterministic=deterministic)
        assert (model.ops.kda_inputs is None) == (not ops)
        logits[bool(ops)] = run(model)
    if deterministic:
        assert torch.equal(logits[True], logits[False])
    torch.testing.assert_close(logits[True], logits[False], rtol=1e-4, atol=1e-4)

"""A model whose prompts go through one operation from convolved rows to o answers as with the chain of operations."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.oracle import Session, engine_model
from helpers.ref_tiny import kimi_k3_tiny, kimi_linear_tiny, random_weights

from anabranch.models import kimi
from anabranch.ops.kda_prefill import reference
from anabranch.ops.registry import select

TINY = {"kl": kimi_linear_tiny(layers=4, kda_layers=(1, 2, 3), full_layers=(4,)), "k3": kimi_k3_tiny()}


def run(model) -> torch.Tensor:
    """Logits of two prompts in ragged pieces, of a mixed pass (no fused step here: the chain), and of decode tokens."""
    session, out = Session(model), []
    out += session.step((0, [3, 1, 4, 1, 5]), (1, [9, 2]))
    out += session.step((0, [6, 5]), (1, [5, 3, 5, 8]))
    out += session.step((0, [6]), (1, [5, 3, 5, 8]), decodes=1)
    out += session.step((0, [2]), (1, [7]), decodes=2)
    return torch.cat(out)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("producer", [{}, {"kda_inputs": "reference"}])
def test_logits_are_those_of_the_chain(name, producer, monkeypatch):
    config, weights, calls = TINY[name], random_weights(TINY[name], 1), []
    want = run(engine_model(config, weights, ops=producer))

    def prompt(*args: Any) -> torch.Tensor:
        calls.append(len(args[-3]))
        return reference.kda_prompt(*args)

    def chosen(*args: Any, **options: Any) -> Any:
        selection = select(*args, **options)
        return replace(selection, ops=replace(selection.ops, kda_prompt=prompt, prefill_layout="grouped"))

    monkeypatch.setattr(kimi, "select", chosen)
    got = run(engine_model(config, weights, ops=producer))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    layers = len(config.kda_layers)
    assert calls == [2] * (2 * layers) + [1] * layers  # in the mixed pass the decode step takes the other sequence

"""Captured prompts know lengths on the device only: host numbers say how much room there is, wherever a prompt ends."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import emulated
from helpers.kda_prefill import fresh, prompt_inputs, rows_of

from anabranch.ops import native
from anabranch.ops.kda_inputs.triton import kda_inputs
from anabranch.ops.kda_prefill import chunked, cuda
from anabranch.ops.kda_prefill.spec import CHUNK

SIZE = 128
ENDS = pytest.mark.parametrize("count", [1, 100, SIZE])


def padded(count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A prompt and its padding with true host lengths, and the same with those of a graph."""
    given = prompt_inputs([count, SIZE - count], 1)
    given["slots"][1] = -1
    room = fresh(given)
    room["segments"] = replace(given["segments"], lengths=(SIZE - 1, 1), totals=(SIZE - 1, 0))
    offsets = torch.zeros(16, dtype=torch.int64)  # what a graph holds behind them
    offsets[:3] = given["segments"].offsets
    room["segments"] = replace(room["segments"], offsets=offsets[:3])
    return given, room


@pytest.mark.parametrize("kernels", ["cuda", "chunked"])
@ENDS
def test_the_delta_rule(monkeypatch, kernels, count):
    if kernels == "cuda":
        if why := emulated.why_not():
            pytest.skip(why)
        built = emulated.module("kda_prefill")
        monkeypatch.setattr(native, "load", lambda folder: built)
    given, room = padded(count)
    room["saves"] = torch.full((chunked.chunks_of(room["segments"]),), -1)
    spare = next(s for s in range(len(room["state"])) if s not in given["slots"].tolist())
    if count >= CHUNK:
        room["saves"][count // CHUNK - 1] = spare
        parts = rows_of(fresh(given), 0, count // CHUNK * CHUNK, int(given["slots"][0]))
    run = cuda.kda_prompt if kernels == "cuda" else chunked.kda_prompt
    want, got = run(**given), run(**room)
    if count >= CHUNK:
        run(**parts)
        assert torch.equal(room["state"][spare], parts["state"][given["slots"][0]])
        room["state"][spare] = given["state"][spare]
    assert torch.equal(got, want)
    assert got.isfinite().all()
    assert not got[count:].any(), "padding gets zeros"
    assert torch.equal(room["state"], given["state"])


@ENDS
def test_the_convolution(count):
    x, weight = torch.randn(SIZE, 48), torch.randn(48, 4)
    logits, slots = torch.randn(SIZE, 1), torch.tensor([2, -1])
    given, room = padded(count)
    pools = [torch.randn(3, 3, 48)] * 2
    pools = [pool.clone() for pool in pools]
    results = [
        kda_inputs(x, parts["segments"], slots, pool, weight, logits, "grouped")
        for parts, pool in zip((given, room), pools, strict=True)
    ]
    for want, got in zip(*results, strict=True):
        assert torch.equal(got, want)
        assert not got[count:].any()
    assert torch.equal(*pools)

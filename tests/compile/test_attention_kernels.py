"""Attention kernels at the shapes of the released models: they fit an H200's shared memory and spill nothing."""

import pytest
import torch

from anabranch.ops.conv.triton import conv
from anabranch.ops.kda_decode.triton import kda_decode
from anabranch.ops.kda_prefill.triton import kda_prefill
from anabranch.ops.kda_step.triton import kda_step
from anabranch.ops.mla.triton import mla_decode
from anabranch.ops.segments import Segments

HEADS = pytest.mark.parametrize("heads", [12, 32, 96])
STATES = pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
D, BATCH, SLOTS = 128, 8, 16


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def token_inputs(heads: int, tokens: int) -> list[torch.Tensor]:
    rows = [meta(tokens, heads, D, dtype=t) for t in (torch.float32, torch.float32, torch.bfloat16, torch.float32)]
    return [*rows, meta(tokens, heads, dtype=torch.float32)]


@HEADS
@STATES
def test_delta_rule(compiled, heads, state_dtype):
    slots, state = meta(BATCH, dtype=torch.int64), meta(SLOTS, heads, D, D, dtype=state_dtype)
    kda_decode(*token_inputs(heads, BATCH), slots, state)
    segments = Segments.of([5] * BATCH, device="meta")
    kda_prefill(*token_inputs(heads, 5 * BATCH), segments, slots, state)
    decode, prefill = compiled
    assert decode is prefill, "equal bits in decode and prefill rest on their being one binary"
    assert all(u.registers <= 128 for u in compiled.check())


@HEADS
@STATES
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_fused_decode_step(compiled, heads, state_dtype, lower_bound):
    width = heads * D
    kda_step(
        meta(BATCH, 5 * width)[:, : 3 * width],
        meta(SLOTS, 3, 3 * width),
        meta(3 * width, 4, dtype=torch.float32),
        meta(BATCH, width),
        meta(BATCH, heads),
        meta(BATCH, width),
        meta(width, dtype=torch.float32),
        meta(heads, dtype=torch.float32),
        lower_bound,
        meta(D, dtype=torch.float32),
        1e-5,
        meta(BATCH, dtype=torch.int64),
        meta(SLOTS, heads, D, D, dtype=state_dtype),
    )
    compiled.check()


@HEADS
@pytest.mark.parametrize("length", [1, 7])
def test_conv(compiled, heads, length):
    width = 3 * heads * D
    segments = Segments.of([length] * BATCH, device="meta")
    slots, weight = meta(BATCH, dtype=torch.int64), meta(width, 4, dtype=torch.float32)
    x = meta(BATCH * length, width + 128)[:, :width]
    conv(x, segments, slots, meta(SLOTS, 3, width), weight)
    assert len(compiled.check()) == (1 if length == 1 else 2)


@HEADS
def test_latent_attention(compiled, heads):
    kv_b = meta(heads, 256, 512)
    q, pages = meta(BATCH, heads, 192), meta(64, 64, 576)
    mla_decode(q, meta(BATCH, dtype=torch.int64), meta(BATCH, 32, dtype=torch.int64), pages, kv_b)
    names = [u.name for u in compiled.check()]
    assert names == ["_head_gemm", "_attend_splits", "_merge_splits", "_head_gemm"]

"""Log softmax in two Triton launches: fixed chunks of a row side by side, then one fixed sum over the chunks.

A row's bits depend on the row alone: the chunk length is constant. See spec.py for shapes.
"""

import torch
import triton
import triton.language as tl

from anabranch.ops.gate.triton import exp32
from anabranch.ops.norm.triton import fixed_layout

_CHUNK = 4096


@triton.jit
def _chunk_sums(logits, peaks, sums, width, stride, chunks, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row * stride + column, mask=column < width, other=float("-inf"))
    peak = tl.max(value, 0)
    # a chunk of -inf alone has no finite peak to subtract
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(peaks + row * chunks + chunk, peak)
    tl.store(sums + row * chunks + chunk, tl.sum(exp32(value - shift), 0))


@triton.jit
def _subtract(logits, peaks, sums, y, width, stride, chunks, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.arange(0, CHUNKS)
    part = tl.load(peaks + row * chunks + c, mask=c < chunks, other=float("-inf"))
    peak = tl.max(part, 0)
    raised = tl.load(sums + row * chunks + c, mask=c < chunks, other=0.0)
    total = tl.sum(raised * exp32(tl.where(part == float("-inf"), float("-inf"), part - peak)), 0)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row * stride + column, mask=column < width, other=0.0)
    tl.store(y + row * width + column, value - peak - tl.log(total), mask=column < width)


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """logits - max - log(sum(exp(logits - max))): fp32 [W, V]."""
    logits = fixed_layout(logits)
    rows, width = logits.shape
    y = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    chunks = triton.cdiv(width, _CHUNK)
    peaks = torch.empty((2, rows, chunks), dtype=torch.float32, device=logits.device)
    if rows:
        sizes = (width, logits.stride(0), chunks)
        _chunk_sums[(rows, chunks)](logits, peaks[0], peaks[1], *sizes, CHUNK=_CHUNK, num_warps=4)
        count = triton.next_power_of_2(chunks)
        _subtract[(rows, chunks)](logits, peaks[0], peaks[1], y, *sizes, CHUNKS=count, CHUNK=_CHUNK, num_warps=4)
    return y

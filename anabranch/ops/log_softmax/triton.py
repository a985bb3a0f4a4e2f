"""Log softmax, and the greedy choice, in two Triton launches each: chunks of a row, then one fixed sum over them.

A row's bits depend on the row alone: the chunk length is constant. See spec.py for shapes.
"""

import torch
import triton
import triton.language as tl

from anabranch.ops.early import early_launch, follow
from anabranch.ops.gate.triton import exp32
from anabranch.ops.norm.triton import fixed_layout

_CHUNK = 4096


@triton.jit
def _chunk_sums(
    logits, peaks, sums, places, width, stride, chunks, CHUNK: tl.constexpr, PICK: tl.constexpr, EARLY: tl.constexpr
):
    """Peak and sum of one chunk; with PICK also the peak's column, and NaN for the sum if a value is not finite."""
    follow(EARLY)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row * stride + column, mask=column < width, other=float("-inf")).to(tl.float32)
    peak = tl.max(value, 0)
    # a chunk of -inf alone has no finite peak to subtract
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(exp32(value - shift), 0)
    if PICK:
        finite = (tl.abs(value) < float("inf")) | (column >= width)
        total = tl.where(tl.min(finite.to(tl.int32), 0) == 1, total, float("nan"))
        place = tl.min(tl.where(value == peak, column, width - 1), 0)
        tl.store(places + row * chunks + chunk, place)
    tl.store(peaks + row * chunks + chunk, peak)
    tl.store(sums + row * chunks + chunk, total)


@triton.jit
def _row_total(peaks, sums, row, chunks, CHUNKS: tl.constexpr):
    """(each chunk's peak, the row's peak, the row's sum of exponentials below it)."""
    c = tl.arange(0, CHUNKS)
    part = tl.load(peaks + row * chunks + c, mask=c < chunks, other=float("-inf"))
    peak = tl.max(part, 0)
    raised = tl.load(sums + row * chunks + c, mask=c < chunks, other=0.0)
    return part, peak, tl.sum(raised * exp32(tl.where(part == float("-inf"), float("-inf"), part - peak)), 0)


@triton.jit
def _subtract(logits, peaks, sums, y, width, stride, chunks, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, peak, total = _row_total(peaks, sums, row, chunks, CHUNKS)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row * stride + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(y + row * width + column, value - peak - tl.log(total), mask=column < width)


@triton.jit
def _choose(peaks, sums, places, tokens, logprobs, chunks, CHUNKS: tl.constexpr, EARLY: tl.constexpr):
    follow(EARLY)
    row = tl.program_id(0).to(tl.int64)
    part, peak, total = _row_total(peaks, sums, row, chunks, CHUNKS)
    c = tl.arange(0, CHUNKS)
    place = tl.load(places + row * chunks + c, mask=c < chunks, other=0)
    # chunks lie in ascending order, so the first that holds the peak holds its lowest column
    first = tl.min(tl.where((part == peak) & (c < chunks), c, chunks - 1), 0)
    tl.store(tokens + row, tl.sum(tl.where(c == first, place, 0), 0).to(tl.int64))
    tl.store(logprobs + row, 0.0 - tl.log(total))


def _chunked(logits: torch.Tensor, pick: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    """fp32 [2, W, chunks] of peaks and sums, int32 [W, chunks] of the peaks' columns, chunks."""
    rows, width = logits.shape
    chunks = triton.cdiv(width, _CHUNK)
    parts = torch.empty((2, rows, chunks), dtype=torch.float32, device=logits.device)
    places = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device) if pick else parts
    sizes = (width, logits.stride(0), chunks)
    _chunk_sums[(rows, chunks)](
        *(logits, parts[0], parts[1], places, *sizes), CHUNK=_CHUNK, PICK=pick, num_warps=4, **early_launch()
    )
    return parts, places, chunks


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """logits - max - log(sum(exp(logits - max))): fp32 [W, V]."""
    logits = fixed_layout(logits)
    rows, width = logits.shape
    y = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if rows:
        parts, _, chunks = _chunked(logits, False)
        sizes, count = (width, logits.stride(0), chunks), triton.next_power_of_2(chunks)
        _subtract[(rows, chunks)](logits, parts[0], parts[1], y, *sizes, CHUNKS=count, CHUNK=_CHUNK, num_warps=4)
    return y


def pick(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The most probable token of each row, int64 [W], and its log probability, fp32 [W]: NaN if a logit is not finite.

    The log probability has the bits that `log_softmax` has at that token.
    """
    logits = fixed_layout(logits)
    rows = logits.shape[0]
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        parts, places, chunks = _chunked(logits, True)
        count = triton.next_power_of_2(chunks)
        found = (tokens, logprobs)
        _choose[(rows,)](*parts, places, *found, chunks, CHUNKS=count, num_warps=4, **early_launch())
    return tokens, logprobs

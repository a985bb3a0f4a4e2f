"""Prefill in the explicit form on cuDNN's attention kernel, one sequence at a time. See spec.py for shapes.

The kernel knows a causal square and a full rectangle. New tokens meet each other in the square and the context before
them in rectangles of at most STRETCH rows, which bounds the expanded keys and values; parts are merged by the
logarithms of their sums.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from anabranch.ops.gate.triton import exp32, log32
from anabranch.ops.mla.reference import cached_rows
from anabranch.ops.segments import Segments

STRETCH = 16_384  # context rows expanded at once
MULTIPLE = 64  # of query rows: the library plans anew for every size
_ROWS = 16  # (token, head) rows of one program of the merge


def mla_prefill(
    q: torch.Tensor,
    segments: Segments,
    block_table: torch.Tensor,
    pages: torch.Tensor,
    kv_b: torch.Tensor,
) -> torch.Tensor:
    """Parts are rounded to the model dtype before they are merged, beyond what the explicit form rounds."""
    nope, lengths = q.shape[-1] - (pages.shape[-1] - kv_b.shape[-1]), list(segments.lengths)
    rows = [cached_rows(pages, table, total) for table, total in zip(block_table, segments.totals, strict=True)]
    # the new tokens of all sequences are expanded together
    new = [r[len(r) - n :] for r, n in zip(rows, lengths, strict=True)]
    keys, values = _expand(new[0] if len(new) == 1 else torch.cat(new), kv_b, nope)
    parts = zip(q.split(lengths), keys.split(lengths), values.split(lengths), rows, strict=True)
    outputs = [_sequence(a, k, v, context[: len(context) - len(a)], kv_b, nope) for a, k, v, context in parts]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: torch.Tensor, kv_b: torch.Tensor, nope: int
) -> torch.Tensor:
    """q, k [n, H, d] and v [n, H, e] of new tokens behind `context` [c, R]: [n, H * e]."""
    count, short = len(q), -len(q) % MULTIPLE
    if short:  # behind a causal square's last row more may stand, if it is finite
        q, k, v = (F.pad(t, (0, 0, 0, 0, 0, short)) for t in (q, k, v))
    o, sums = attend(q, k, v, causal=True, sums=len(context) > 0)
    for first in range(0, len(context), STRETCH):
        part, part_sums = attend(q, *_expand(context[first : first + STRETCH], kv_b, nope), causal=False, sums=True)
        last = first + STRETCH >= len(context)
        o, sums = merge(o, sums, part, part_sums, q.dtype if last else torch.float32)
    return o[:count].flatten(1)


def _expand(rows: torch.Tensor, kv_b: torch.Tensor, nope: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cache rows [m, R] as keys [m, H, nope + rope] and values [m, H, v]; products are written where they belong."""
    (heads, columns, rank), width = kv_b.shape, rows.shape[1]
    latent = rows[:, :rank].expand(heads, -1, -1)
    keys = torch.empty(len(rows), heads, nope + width - rank, dtype=rows.dtype, device=rows.device)
    values = torch.empty(len(rows), heads, columns - nope, dtype=rows.dtype, device=rows.device)
    torch.bmm(latent, kv_b[:, :nope].mT, out=keys[..., :nope].transpose(0, 1))
    torch.bmm(latent, kv_b[:, nope:].mT, out=values.transpose(0, 1))
    keys[..., nope:] = rows[:, None, rank:]
    return keys, values


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, sums: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [n, H, d], k [m, H, d], v [m, H, e] -> o [n, H, e] and, asked for, ln sum exp of the scores, fp32 [H, n]."""
    batched = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    o, logs, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*batched, None, sums, 0.0, causal)
    return o[0].transpose(0, 1), logs.view(q.shape[1], len(q)) if sums else logs


def merge(
    a: torch.Tensor, a_sums: torch.Tensor, b: torch.Tensor, b_sums: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two sets of keys from the attention over each: outputs [n, H, e], sums fp32 [H, n]."""
    count, heads, width = a.shape
    y, sums = torch.empty(a.shape, dtype=dtype, device=a.device), torch.empty_like(a_sums)
    grid = (triton.cdiv(count * heads, _ROWS),)
    strides = (*a.stride()[:2], *b.stride()[:2])
    block = triton.next_power_of_2(width)
    _merge[grid](a, a_sums, b, b_sums, y, sums, count, *strides, H=heads, V=width, ROWS=_ROWS, BLOCK=block, num_warps=4)
    return y, sums


@triton.jit(do_not_specialize=["T"])
def _merge(
    a, a_sums, b, b_sums, y, sums, T, a_token, a_head, b_token, b_head,
    H: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    t, h, c = row // H, row % H, tl.arange(0, BLOCK)
    real = t < T
    inside = real[:, None] & (c < V)[None, :]
    left = tl.load(a_sums + h * T + t, real, other=0.0)
    right = tl.load(b_sums + h * T + t, real, other=0.0)
    best = tl.maximum(left, right)
    p, q = exp32(left - best), exp32(right - best)
    x = tl.load(a + (t * a_token + h * a_head)[:, None] + c[None, :], inside, other=0.0).to(tl.float32)
    z = tl.load(b + (t * b_token + h * b_head)[:, None] + c[None, :], inside, other=0.0).to(tl.float32)
    mixed = (x * p[:, None] + z * q[:, None]) / (p + q)[:, None]
    tl.store(y + (row * V)[:, None] + c[None, :], mixed.to(y.dtype.element_ty), inside)
    tl.store(sums + h * T + t, best + log32(p + q), real)

"""The operations that the layers call, in forms that autograd can differentiate, for batches of whole equal rows.

Everything pure is the package's own reference, compiled on a GPU. Four operations are replaced: the references of conv
and kda_prefill write pools in place, that of routed_experts waits for the device, and mla_prefill would build a score
matrix. KDA runs fla-core's chunk kernels on a GPU and the package's chunk reference elsewhere.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from anabranch.config.model import ActivationConfig, ModelConfig
from anabranch.ops.arithmetic import silu
from anabranch.ops.glu.reference import glu
from anabranch.ops.kda_prefill import reference as kda_reference
from anabranch.ops.registry import Ops, select
from anabranch.ops.segments import Segments

from .tuning import shorten

Tensor = torch.Tensor

_PURE = (
    *("rms_norm", "add_rms_norm", "l2_norm", "gated_rms_norm", "log_decay"),
    *("sigmoid_gate", "glu", "route", "residual_norm"),
)


def training_ops(config: ModelConfig, rows: int, length: int, *, compiled: bool = False, fla: bool = False) -> Ops:
    """Operations for packed batches of `rows` sequences of `length` tokens.

    Args:
        compiled: run elementwise operations through torch.compile.
        fla: run the KDA recurrence through the package `fla` (GPU, 16-bit operands).
    """
    make = _compiler() if compiled else lambda function: function
    base = select(config, torch.device("cpu")).ops
    shape, dense, short = (rows, length), make(_experts), make(_convolution)
    own: dict[str, Any] = {
        "conv": lambda x, segments, slots, pool, weight: short(x, weight, shape),
        "kda_prefill": (_fla_kda if fla else _reference_kda)(shape),
        "mla_prefill": lambda q, segments, table, pages, kv_b: _attention(q, pages, kv_b, shape),
        "routed_experts": lambda x, weights, experts, bank, activation: dense(
            x, weights, experts, bank.w13, bank.w2, activation
        ),
    }
    pure = {name: make(getattr(base, name)) for name in _PURE}
    return replace(base, **pure, **own, kda_inputs=None, kda_step=None, kda_prompt=None, prefill_layout="normed")


def _compiler() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """torch.compile with one kernel set a shape: a norm is called with several widths and numbers of banked rows."""
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = 64
    dynamo.specialize_float = True
    return lambda function: torch.compile(function, dynamic=False, fullgraph=True)


def _convolution(x: Tensor, weight: Tensor, shape: tuple[int, int]) -> Tensor:
    """Every row starts with an empty history: [T, C] -> [T, C]."""
    taps, length = weight.shape[1], shape[1]
    padded = F.pad(x.unflatten(0, shape), (0, 0, taps - 1, 0))
    acc = padded[:, :length].float() * weight[:, 0]
    for tap in range(1, taps):
        acc = acc + padded[:, tap : tap + length].float() * weight[:, tap]
    return silu(acc).to(x.dtype).flatten(0, 1)


def _fla_kda(shape: tuple[int, int]) -> Callable[..., Tensor]:
    from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]

    shorten()

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *_: Any) -> Tensor:
        parts = (t.unflatten(0, shape) for t in (q.to(v.dtype), k.to(v.dtype), v, g, beta))
        return chunk_kda(*parts, safe_gate=True)[0].flatten(0, 1)  # log_decay keeps gates within -5 .. 0

    return run


def _reference_kda(shape: tuple[int, int]) -> Callable[..., Tensor]:
    """All rows at once: heads of other rows are as independent as heads of the same one."""
    rows, length = shape

    def side_by_side(t: Tensor) -> Tensor:
        return t.unflatten(0, shape).transpose(0, 1).flatten(1, 2)

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *_: Any) -> Tensor:
        heads, dim = v.shape[1:]
        segments, slots = Segments.of([length], device="cpu"), torch.zeros(1, dtype=torch.long)
        # a 16-bit pool is copied where it is read, so writing the last states does not touch what autograd keeps
        pool = torch.zeros(1, rows * heads, dim, dim, dtype=torch.bfloat16, device=v.device)
        o = kda_reference.kda_prefill(*map(side_by_side, (q, k, v, g, beta)), segments, slots, pool)
        return o.unflatten(1, (rows, heads)).transpose(0, 1).flatten(0, 1)

    return run


def _attention(q: Tensor, pages: Tensor, kv_b: Tensor, shape: tuple[int, int]) -> Tensor:
    """Explicit form over rows that lie in the pages in their order: q [T, H, qk] -> [T, H * v]."""
    rank, heads = kv_b.shape[-1], q.shape[1]
    latent, shared = pages.view(-1, pages.shape[-1])[: q.shape[0]].split([rank, pages.shape[-1] - rank], -1)
    nope = q.shape[-1] - shared.shape[-1]
    expanded = F.linear(latent, kv_b.flatten(0, 1)).unflatten(1, (heads, -1))
    keys = torch.cat([expanded[..., :nope], shared[:, None].expand(-1, heads, -1)], -1)
    split = (t.unflatten(0, shape).transpose(1, 2) for t in (q, keys, expanded[..., nope:]))
    o = F.scaled_dot_product_attention(*split, is_causal=True)
    return o.transpose(1, 2).flatten(2).flatten(0, 1)


def _experts(
    x: Tensor, weights: Tensor, experts: Tensor, w13: Tensor, w2: Tensor, activation: ActivationConfig
) -> Tensor:
    """Every expert on every token in two GEMMs, weighted by zero where it was not chosen: [T, W] -> [T, W]."""
    chosen = weights.new_zeros(len(x), w13.shape[0]).scatter(1, experts, weights)
    hidden = glu(F.linear(x, w13.flatten(0, 1)).unflatten(-1, w13.shape[:2]), activation)
    weighted = (hidden.float() * chosen.unsqueeze(-1)).to(x.dtype).flatten(1)
    return F.linear(weighted, w2.transpose(0, 1).flatten(1))

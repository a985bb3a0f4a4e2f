"""The whole KDA decode step in one launch of CUDA C++ for Hopper (csrc/). See spec.py for shapes and early reads.

Heads have 128 channels, rows are bf16. Every way to run it (`Plan`) gives the same bits; which one is taken depends on
the heads in the batch alone, by times measured on an H200 (docs/fusions.md).
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import torch

from anabranch.ops import native

D, TAPS = 128, 4


class Release(IntEnum):
    """When the kernel behind a step may start: at once, behind the step's own wait, or behind its pass over states."""

    AT_ONCE, BEHIND_WAIT, BEHIND_PASS = range(3)


@dataclass(frozen=True, slots=True)
class Plan:
    """A compiled variant (names in csrc/kda_step.cu) and how it is launched.

    `prefetch`: how many heads ahead state is pulled into L2. `chained`: may start before the kernel before it has
    ended.
    """

    variant: str
    prefetch: int = 0
    chained: bool = True
    release: Release = Release.BEHIND_WAIT


# (most heads in the batch, plan), by what is compiled in: (state dtype, f_b inside, several tokens)
_PLANS: dict[tuple[torch.dtype, bool, bool], tuple[tuple[float, Plan], ...]] = {
    (torch.float32, False, False): (
        (32, Plan("f32_s8_t128x8_reg", release=Release.AT_ONCE)),
        (200, Plan("f32_s1_t128x3_tma1_ef")),
        # between one and two waves: dependents that start during the pass would make the placement uneven
        (270, Plan("f32_s1_t128x3_tma1_ef", release=Release.BEHIND_PASS)),
        (1000, Plan("f32_s1_t128x3_bulk1_ef")),
        (float("inf"), Plan("f32_s1_t256x3_tma1_efs", prefetch=66, release=Release.AT_ONCE)),
    ),
    (torch.bfloat16, False, False): (
        (32, Plan("bf16_s8_t128x8_reg")),
        (1000, Plan("bf16_s1_t128x3_tma2_ef")),
        (float("inf"), Plan("bf16_s1_t256x3_tma2", prefetch=132)),
    ),
    (torch.float32, True, False): (
        (32, Plan("f32_s4_t256x2_reg_fb")),
        (1000, Plan("f32_s1_t128x3_tma2_fb_ef")),
        (float("inf"), Plan("f32_s1_t512x2_tma2_fb")),
    ),
    (torch.bfloat16, True, False): (
        (32, Plan("bf16_s4_t256x2_reg_fb")),
        (float("inf"), Plan("bf16_s1_t128x3_tma2_fb_ef")),
    ),
    (torch.float32, False, True): (
        (32, Plan("f32_s8_t128x4_reg_many")),
        (float("inf"), Plan("f32_s1_t128x3_tma1_many_ef")),
    ),
    (torch.bfloat16, False, True): (
        (32, Plan("bf16_s8_t128x4_reg_many")),
        (float("inf"), Plan("bf16_s1_t128x3_tma2_many_ef")),
    ),
}


def choose(heads_in_batch: int, state_dtype: torch.dtype, f_b: bool = False, many: bool = False) -> Plan:
    """The fastest plan measured for requests x heads."""
    return next(plan for most, plan in _PLANS[state_dtype, f_b, many] if heads_in_batch <= most)


@cache
def variants() -> dict[str, int]:
    """Every compiled variant and its number."""
    return {str(name): i for i, name in enumerate(native.load("kda_step").variants())}


def kda_step(
    qkv: torch.Tensor,
    conv_pool: torch.Tensor,
    conv_weight: torch.Tensor,
    forget: torch.Tensor,
    beta_logits: torch.Tensor,
    gate: torch.Tensor,
    dt_bias: torch.Tensor,
    a_log: torch.Tensor,
    lower_bound: float | None,
    norm_weight: torch.Tensor,
    eps: float,
    slots: torch.Tensor,
    state: torch.Tensor,
    *,
    early: bool = False,
    keep: torch.Tensor | None = None,
    f_b: torch.Tensor | None = None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """The tokens of every slot, from raw projections to the normed and gated output. In place on both pools.

    Args:
        plan: None takes the fastest; another must be compiled for this state dtype, `f_b` and number of tokens.

    Raises:
        ValueError: a shape, dtype or layout that the kernel was not made for, or several tokens with `f_b`.
    """
    requests, heads = slots.shape[0], state.shape[1] if state.ndim == 4 else 0
    y = torch.empty(qkv.shape[0], heads * D, dtype=qkv.dtype, device=qkv.device)
    if not requests:
        return y
    tokens = qkv.shape[0] // requests
    rows = {"qkv": qkv, "forget": forget, "beta_logits": beta_logits, "gate": gate}
    _check_pools(conv_pool, state, heads)
    _check_rows(rows, requests * tokens, heads, f_b is not None)
    _check_weights(conv_weight, dt_bias, a_log, norm_weight, f_b, heads)
    _check_slots(slots, keep, requests, tokens)
    if tokens > 1 and f_b is not None:
        raise ValueError(f"kda_step: f_b inside takes one token a request, not {tokens}")
    plan = plan or choose(requests * heads, state.dtype, f_b is not None, tokens > 1)
    native.load("kda_step").run(
        *(variants()[plan.variant], qkv, conv_pool, conv_weight, forget, f_b, beta_logits, gate),
        *(dt_bias, a_log, norm_weight, slots, keep, state, y, lower_bound or 0.0, eps),
        *(plan.chained, plan.chained and early, plan.release, plan.prefetch),
    )
    return y


def _refuse(name: str, has: object, needs: str) -> None:
    raise ValueError(f"kda_step: {name} is {has}, needs {needs}")


def _check_pools(conv_pool: torch.Tensor, state: torch.Tensor, heads: int) -> None:
    if state.dtype not in (torch.float32, torch.bfloat16):
        _refuse("state", state.dtype, "float32 or bfloat16")
    for name, pool, slot in (("state", state, (heads, D, D)), ("conv_pool", conv_pool, (3, 3 * heads * D))):
        if tuple(pool.shape[1:]) != slot:
            _refuse(name, list(pool.shape), f"[slots, {', '.join(map(str, slot))}]")
        if not pool[:1].is_contiguous():
            _refuse(name, f"of strides {pool.stride()}", "dense slots")
    if conv_pool.dtype != torch.bfloat16:
        _refuse("conv_pool", conv_pool.dtype, "bfloat16")
    if conv_pool.shape[0] != state.shape[0]:
        _refuse("conv_pool", f"of {conv_pool.shape[0]} slots", f"as many as state, {state.shape[0]}")
    if state.data_ptr() % 16 or state.stride(0) * state.element_size() % 16:
        _refuse("state", f"at {state.data_ptr() % 16} bytes, pitch {state.stride(0)}", "slots on 16 bytes")


def _check_rows(rows: dict[str, torch.Tensor], count: int, heads: int, deferred: bool) -> None:
    widths = {"qkv": 3 * heads * D, "forget": D if deferred else heads * D, "beta_logits": heads, "gate": heads * D}
    for name, t in rows.items():
        if tuple(t.shape) != (count, widths[name]):
            _refuse(name, list(t.shape), f"[{count}, {widths[name]}]")
        if t.dtype != torch.bfloat16:
            _refuse(name, t.dtype, "bfloat16")
        # the inner stride of one column means nothing
        if t.stride(1) != 1 and t.shape[1] > 1:
            _refuse(name, f"of strides {t.stride()}", "unit inner stride")
    if deferred and (rows["forget"].data_ptr() % 16 or rows["forget"].stride(0) % 8):
        _refuse("forget", f"of row stride {rows['forget'].stride(0)}", "rows on 16 bytes where f_b is given")


def _check_weights(
    conv_weight: torch.Tensor,
    dt_bias: torch.Tensor,
    a_log: torch.Tensor,
    norm_weight: torch.Tensor,
    f_b: torch.Tensor | None,
    heads: int,
) -> None:
    weights: list[tuple[str, torch.Tensor, tuple[int, ...], torch.dtype]] = [
        ("conv_weight", conv_weight, (3 * heads * D, TAPS), torch.float32),
        ("dt_bias", dt_bias, (heads * D,), torch.float32),
        ("a_log", a_log, (heads,), torch.float32),
        ("norm_weight", norm_weight, (D,), torch.float32),
    ]
    if f_b is not None:
        weights.append(("f_b", f_b, (heads * D, D), torch.bfloat16))
    for name, t, shape, dtype in weights:
        if tuple(t.shape) != shape or t.dtype != dtype or not t.is_contiguous():
            _refuse(name, f"{t.dtype} {list(t.shape)} of strides {t.stride()}", f"dense {dtype} {list(shape)}")
        if t.ndim == 2 and t.data_ptr() % 16:
            _refuse(name, f"at {t.data_ptr() % 16} bytes", "16-byte alignment")


def _check_slots(slots: torch.Tensor, keep: torch.Tensor | None, requests: int, tokens: int) -> None:
    for name, t, shape in (("slots", slots, (requests,)), ("keep", keep, (requests, tokens))):
        if t is not None and (tuple(t.shape) != shape or t.dtype != torch.int64):
            _refuse(name, f"{t.dtype} {list(t.shape)}", f"torch.int64 {list(shape)}")

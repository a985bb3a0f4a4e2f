"""Inputs of a KDA prefill as a layer delivers them, and the recurrence token by token in fp64."""

from typing import Any

import torch

from anabranch.ops.segments import Segments

BOUNDS = {"bounded": -5.0, "softplus": None}


def prompt_inputs(
    lengths: list[int],
    heads: int,
    gate: str = "bounded",
    *,
    dim: int = 128,
    near: float | None = None,
    padding: int = 0,
    dense: bool = False,
    slots: int | None = None,
    state_dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of kda_prompt by name.

    Args:
        near: keys and queries are one vector with noise of this size, the gate hardly decays and beta is near 1.
        padding: rows of NaN behind the last segment.
        dense: q, k and v apart, instead of slices of one row.
        slots: size of the pool; None is two more than there are segments.
    """
    make = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=make, device=device).to(dtype)

    tokens, width = sum(lengths), heads * dim
    rows, slots = tokens + padding, slots or len(lengths) + 2
    wide = randn(rows, 3 * width + heads + -heads % 16)
    if near is not None:
        wide[:, : 2 * width] = randn(1, width).repeat(1, 2) + near * randn(rows, 2 * width, dtype=torch.float32)
    forget, beta = randn(rows, width), wide[:, 3 * width : 3 * width + heads]
    if near is not None:
        forget, beta = torch.full_like(forget, -12.0), torch.full_like(beta, 7.0)
    for t in (wide, forget, beta):
        t[tokens:] = float("nan")
    q, k, v = (t.unflatten(1, (heads, dim)) for t in wide[:, : 3 * width].split(width, 1))
    if dense:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return {
        "q": q,
        "k": k,
        "v": v,
        "forget": forget.unflatten(1, (heads, dim)),
        "beta_logits": beta,
        "dt_bias": randn(width, dtype=torch.float32) * 0.5,
        "a_log": randn(heads, dtype=torch.float32) * 0.5,
        "lower_bound": BOUNDS[gate],
        "saves": None,
        "segments": Segments.of(lengths, device=device),
        "slots": torch.randperm(slots, generator=make, device=device)[: len(lengths)],
        "state": randn(slots, heads, dim, dim, dtype=torch.float32).mul(0.3).to(state_dtype),
    }


def fresh(given: dict[str, Any]) -> dict[str, Any]:
    """The same arguments on a copy of the pool."""
    return given | {"state": given["state"].clone()}


def rows_of(given: dict[str, Any], first: int, last: int, slot: int) -> dict[str, Any]:
    """The tokens first .. last - 1 as one segment of one slot, on the same pool."""
    device = given["v"].device
    names = ("q", "k", "v", "forget", "beta_logits")
    alone = {"segments": Segments.of([last - first], device=device), "slots": torch.tensor([slot], device=device)}
    return given | {name: given[name][first:last] for name in names} | alone


def exact_prompt(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [T, H, D] and final states [B, H, D(value), D(key)] in fp64 from the written-out formulas."""
    q, k = ((t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()) for t in (given["q"].double(), given["k"].double()))
    v, heads, dim = given["v"].double(), *given["v"].shape[1:]
    zeta = given["forget"].double() + given["dt_bias"].double().view(heads, dim)
    rate, bound = given["a_log"].double().exp().view(heads, 1), given["lower_bound"]
    decay = (-rate * torch.nn.functional.softplus(zeta) if bound is None else bound * (rate * zeta).sigmoid()).exp()
    beta, at, outputs, states = given["beta_logits"].double().sigmoid().unsqueeze(-1), 0, [], []
    for length, slot in zip(given["segments"].lengths, given["slots"].tolist(), strict=True):
        S = given["state"][slot].double()
        for t in range(at, at + length):
            S = S * decay[t].unsqueeze(-2)
            error = beta[t] * (v[t] - (S @ k[t].unsqueeze(-1)).squeeze(-1))
            S = S + error.unsqueeze(-1) * k[t].unsqueeze(-2)
            outputs.append((S @ q[t].unsqueeze(-1)).squeeze(-1) * dim**-0.5)
        states.append(S)
        at += length
    return torch.stack(outputs), torch.stack(states)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over norm of `want`."""
    return float((got.double() - want.double()).norm() / want.double().norm())

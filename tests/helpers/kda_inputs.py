"""Inputs of the fused decode step as a model delivers them: slices of merged projections, weights and slot pools."""

from typing import Any

import torch

D = 128


def step_inputs(
    requests: int,
    heads: int,
    *,
    tokens: int = 1,
    state_dtype: torch.dtype = torch.float32,
    bound: float | None = -5.0,
    f_b: bool = False,
    spare: int = 3,
    gap: int = 0,
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, Any]:
    """Arguments of kda_step by name; `spare` slots belong to nobody, `gap` elements x 8 lie between two slots."""
    make = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return (torch.randn(shape, generator=make, device=device) * scale).to(dtype)

    width, slots, rows = heads * D, requests + spare, requests * tokens
    pad = -(D + heads) % 16
    wide = randn(rows, 4 * width + D + heads + pad)
    qkv, gate, f_a, beta, _ = wide.split([3 * width, width, D, heads, pad], -1)
    history = randn(slots, 9 * width + 8 * gap)[:, : 9 * width].unflatten(1, (3, 3 * width))
    state = randn(slots, width * D + 8 * gap, scale=0.1, dtype=state_dtype)[:, : width * D].unflatten(1, (heads, D, D))
    given = {
        "qkv": qkv,
        "conv_pool": history,
        "conv_weight": randn(3 * width, 4, scale=0.3, dtype=torch.float32),
        "forget": f_a if f_b else randn(rows, width),
        "beta_logits": beta,
        "gate": gate,
        "dt_bias": randn(width, scale=0.5, dtype=torch.float32),
        "a_log": randn(heads, scale=0.5, dtype=torch.float32),
        "lower_bound": bound,
        "norm_weight": 1 + randn(D, scale=0.1, dtype=torch.float32),
        "eps": 1e-5,
        "slots": torch.randperm(slots, generator=make, device=device)[:requests],
        "state": state,
    }
    return given | ({"f_b": randn(width, D, scale=0.1)} if f_b else {})


def kinds(variant: str) -> dict[str, Any]:
    """What a variant's name says about its inputs."""
    state = torch.bfloat16 if variant.startswith("bf16") else torch.float32
    return {"state_dtype": state, "f_b": "_fb" in variant, "tokens": 3 if "_many" in variant else 1}


def fresh_pools(given: dict[str, Any]) -> dict[str, Any]:
    """The same arguments on copies of both pools, with the layout of their slots."""
    return given | {name: _copy(given[name]) for name in ("conv_pool", "state")}


def _copy(pool: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_strided(pool.shape, pool.stride(), dtype=pool.dtype, device=pool.device)
    return copy.copy_(pool)


def rows_of(given: dict[str, Any], first: int, last: int, tokens: int = 1) -> dict[str, Any]:
    """The requests first .. last alone, on the same pools."""
    part = slice(first * tokens, last * tokens)
    names = ("qkv", "forget", "beta_logits", "gate")
    return given | {name: given[name][part] for name in names} | {"slots": given["slots"][first:last]}


def exact_step(given: dict[str, Any], window: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One token in fp64 from the written-out formulas, rounded to bf16 only where the definition rounds.

    `window` bf16 [B, 3, 3P] and `state` fp64 [B, H, D(value), D(key)] of the requests in order: y, window, state after.
    """

    def rounded(t: torch.Tensor) -> torch.Tensor:
        return t.bfloat16().double()

    heads = state.shape[1]
    rows = torch.cat([window, given["qkv"].unsqueeze(1)], 1)
    u = (rows.double() * given["conv_weight"].T.double()).sum(1)
    q, k, v = rounded(u * torch.sigmoid(u)).unflatten(1, (3, heads, D)).unbind(1)
    q, k = ((t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()) for t in (q, k))
    forget = given["forget"].double()
    if "f_b" in given:
        forget = rounded(forget @ given["f_b"].double().T)
    zeta = forget.unflatten(1, (heads, D)) + given["dt_bias"].double().view(heads, D)
    rate, bound = given["a_log"].double().exp().view(heads, 1), given["lower_bound"]
    softplus = torch.where(zeta > 20, zeta, torch.log1p(zeta.clamp(max=20).exp()))
    g = -rate * softplus if bound is None else bound * torch.sigmoid(rate * zeta)
    S = state * g.exp().unsqueeze(-2)
    beta = torch.sigmoid(given["beta_logits"].double()).unsqueeze(-1)
    S = S + (beta * (v - (S * k.unsqueeze(-2)).sum(-1))).unsqueeze(-1) * k.unsqueeze(-2)
    o = rounded((S * q.unsqueeze(-2)).sum(-1) * D**-0.5)
    y = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + given["eps"]) * given["norm_weight"].double()
    y = y * torch.sigmoid(given["gate"].double().unflatten(1, (heads, D)))
    return y.flatten(1), rows[:, 1:], S

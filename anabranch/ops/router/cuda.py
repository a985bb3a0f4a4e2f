"""The router for a few tokens in one launch of CUDA C++ (csrc/), alone or with the norm before it.

See spec.py for shapes. Rows are bf16. A token's bits do not depend on how many tokens there are, up to `FEW_TOKENS`.
"""

import torch

from anabranch.config.model import MoeConfig
from anabranch.ops import native
from anabranch.ops.router import triton
from anabranch.ops.router.plan import FEW_TOKENS, NARROW_EXPERTS, NARROW_WIDTH, scratch_words, unfit


def refusal(
    rows: dict[str, torch.Tensor], weight: torch.Tensor, bias: torch.Tensor, moe: MoeConfig, sync: torch.Tensor | None
) -> str | None:
    """Why these inputs are not ones that the kernels were made for, or None. `rows` have a token each."""
    (tokens, width), experts = rows["x"].shape, len(weight)
    if not 1 <= tokens <= FEW_TOKENS:
        return f"{tokens} tokens, not 1 to {FEW_TOKENS}"
    if why := unfit(moe, width):
        return why
    for name, t in {**rows, "weight": weight}.items():
        if t.dtype != torch.bfloat16 or t.shape[-1] != width:
            return f"{name} is {t.dtype} {list(t.shape)}, not torch.bfloat16 rows of {width}"
        if t.stride(-1) != 1 or t.data_ptr() % 16 or any(step % 8 for step in t.stride()[:-1]):
            return f"{name} has strides {t.stride()} at {t.data_ptr() % 16} bytes, not rows on 16 bytes"
    if bias.dtype != torch.float32 or not bias.is_contiguous():
        return f"bias is {bias.dtype} of strides {bias.stride()}, not dense torch.float32"
    if sync is None or sync.dtype != torch.int32 or sync.numel() < scratch_words(experts) or sync.data_ptr() % 16:
        return f"sync holds {0 if sync is None else sync.numel()} words, not {scratch_words(experts)} on 16 bytes"
    return None


def _run(
    x: torch.Tensor,
    update: torch.Tensor | None,
    gain: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor,
    moe: MoeConfig,
    sync: torch.Tensor,
    chained: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    (tokens, width), experts = x.shape, len(weight)
    dense = {"dtype": x.dtype, "device": x.device}
    total = x if update is None else torch.empty((tokens, width), **dense)
    y = x if gain is None else torch.empty((tokens, width), **dense)
    weights = torch.empty((tokens, moe.top_k), dtype=torch.float32, device=x.device)
    chosen = torch.empty((tokens, moe.top_k), dtype=torch.int64, device=x.device)
    made = (None if update is None else total, None if gain is None else y, weights, chosen)
    wide = width > NARROW_WIDTH or experts > NARROW_EXPERTS
    how = (moe.renormalize and moe.top_k > 1, float(moe.scaling), wide, chained)
    native.load("router").route(x, update, gain, eps, weight, bias, sync, *made, *how)
    return total, y, weights, chosen


def norm_route(
    x: torch.Tensor,
    update: torch.Tensor | None,
    gain: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor,
    moe: MoeConfig,
    sync: torch.Tensor,
    chained: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x + update, its norm y, weights, experts of y); without an update the first is x itself.

    `chained`: the launch may take its place while the kernel before runs; it changes no bit.

    Raises:
        ValueError: inputs that the kernel was not made for; the message names the value.
    """
    rows = {"x": x, "gain": gain[None]} | ({} if update is None else {"update": update})
    if why := refusal(rows, weight, bias, moe, sync):
        raise ValueError(f"norm_route: {why}")
    return _run(x, update, gain, eps, weight, bias, moe, sync, chained)


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    moe: MoeConfig,
    sync: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose by score + bias (the lower index wins a tie), weigh by the unbiased score: fp32 and int64 [T, k].

    What the kernel was not made for runs the Triton router.
    """
    if sync is None or refusal({"x": x}, weight, bias, moe, sync):
        return triton.route(x, weight, bias, moe, sync)
    return _run(x, None, None, 0.0, weight, bias, moe, sync, chained=True)[2:]

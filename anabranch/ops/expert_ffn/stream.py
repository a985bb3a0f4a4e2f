"""The experts of one FFN for at most 8 tokens, in two launches of CUDA C++ (csrc/): weights pass through once.

See spec.py for shapes. Rows are bf16. Every plan gives the same bits, and a token's do not depend on the others.
"""

from functools import cache
from typing import Any

import torch

from anabranch.config.model import ActivationConfig
from anabranch.ops import native
from anabranch.ops.expert_ffn.plan import MOST_INNER, MOST_PAIRS, MOST_ROWS, MOST_TOKENS, MOST_WIDTH, StreamPlan
from anabranch.ops.experts.reference import ExpertBank

Matrices = tuple[torch.Tensor, torch.Tensor]


@cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def refusal(x: torch.Tensor, experts: torch.Tensor, bank: ExpertBank, shared: Matrices | None) -> str | None:
    """Why these inputs are not ones that the kernels were made for, or None."""
    if not hasattr(bank, "w13"):
        return "the experts are not plain matrices"
    store: Any = bank
    matrices = {"gate-up": store.w13, "down": store.w2}
    if shared is not None:
        matrices |= {"shared gate-up": shared[0], "shared down": shared[1]}
    for name, t in {"x": x, **matrices}.items():
        if t.dtype != torch.bfloat16:
            return f"{name} is {t.dtype}, not torch.bfloat16"
        if t.shape[-1] % 8 or t.data_ptr() % 16:
            return f"rows of {name} have {t.shape[-1]} columns at {t.data_ptr() % 16} bytes, not multiples of 8 and 16"
        if t is not x and not t.is_contiguous():
            return f"{name} is not dense"
    if x.stride(1) != 1 or x.stride(0) % 8:
        return f"x has strides {x.stride()}, not a pitch of a multiple of 8"
    (tokens, width), inner = x.shape, max(m.shape[-1] for name, m in matrices.items() if name.endswith("down"))
    if not 1 <= tokens <= MOST_TOKENS or experts.numel() > MOST_PAIRS:
        return f"{tokens} tokens of {experts.numel()} pairs, not up to {MOST_TOKENS} of {MOST_PAIRS}"
    if width > MOST_WIDTH or inner > MOST_INNER:
        return f"width {width} and inner width {inner}, not up to {MOST_WIDTH} and {MOST_INNER}"
    if x.is_cuda and width > MOST_ROWS * _multiprocessors(x.get_device()):
        return f"width {width} is too much for {_multiprocessors(x.get_device())} multiprocessors"
    return None


def expert_ffn(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    bank: ExpertBank,
    activation: ActivationConfig,
    shared: Matrices | None,
    plan: StreamPlan,
) -> torch.Tensor:
    """round(routed) + shared: [T, V].

    Raises:
        ValueError: inputs that the kernels were not made for; the message names the value.
    """
    if why := refusal(x, experts, bank, shared):
        raise ValueError(f"expert_ffn: {why}")
    store: Any = bank
    w13, w2, (tokens, top_k) = store.w13, store.w2, experts.shape
    gate_up, down = shared or (None, None)
    slots = min(tokens * top_k, bank.count)
    pitch = max(w2.shape[2], 0 if down is None else down.shape[1])
    h = torch.empty((slots + 1, tokens, pitch), dtype=x.dtype, device=x.device)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    experts, weights, call = experts.contiguous(), weights.contiguous(), _call(plan, bank, slots, x)
    situ, caps = activation.name == "situ", (activation.beta, activation.linear_beta or 0.0)
    module = native.load("expert_ffn")
    module.gate_up(x, w13, experts, gate_up, h, call, situ, *caps)
    module.down(h, w2, experts, weights, down, y, call)
    return y


def _call(plan: StreamPlan, bank: ExpertBank, slots: int, x: torch.Tensor) -> Any:
    """The launch parameters, in the order of the struct in expert_ffn.cu."""
    from tvm_ffi import Shape

    blocks = plan.blocks or _multiprocessors(x.get_device())
    flags = (blocks, int(plan.chained), int(plan.ahead), plan.trigger)
    sizes = (plan.pairs, plan.batch, plan.wide_bytes, plan.narrow_bytes)
    return Shape((bank.first, bank.count, slots, *flags, *sizes))

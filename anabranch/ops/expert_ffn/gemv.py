"""The experts of one FFN for one token, in two launches of CUDA C++ (csrc/): products of matrices with a vector.

See spec.py for shapes. Rows are bf16. Every plan gives the same bits.
"""

from functools import cache
from typing import Any

import torch

from anabranch.config.model import ActivationConfig
from anabranch.ops import native
from anabranch.ops.expert_ffn.plan import MOST_CHOICES, MOST_DOWN_WARPS, MOST_HIDDEN, MOST_WIDTH, GemvPlan
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
    (tokens, top_k), width = experts.shape, x.shape[1]
    if tokens != 1 or x.stride(1) != 1:
        return f"{tokens} tokens with strides {x.stride()}, not one dense token"
    inner = max(m.shape[-1] for name, m in matrices.items() if name.endswith("down"))
    if width > MOST_WIDTH or top_k > MOST_CHOICES or (top_k + 2) * -(-inner // 1024) * 1024 > MOST_HIDDEN:
        return f"width {width} and {top_k} experts of {inner} columns, not up to {MOST_WIDTH} and {MOST_HIDDEN} in all"
    return None


def expert_ffn(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    bank: ExpertBank,
    activation: ActivationConfig,
    shared: Matrices | None,
    plan: GemvPlan,
) -> torch.Tensor:
    """round(routed) + shared: [1, V].

    Raises:
        ValueError: inputs that the kernels were not made for; the message names the value.
    """
    if why := refusal(x, experts, bank, shared):
        raise ValueError(f"expert_ffn: {why}")
    store: Any = bank
    w13, w2 = store.w13, store.w2
    gate_up, down = shared or (None, None)
    pitch = max(w2.shape[2], 0 if down is None else down.shape[1])
    h = torch.empty((experts.shape[1] + 1, pitch), dtype=x.dtype, device=x.device)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    experts, weights, call = experts.contiguous(), weights.contiguous(), _call(plan, bank, x)
    situ, caps = activation.name == "situ", (activation.beta, activation.linear_beta or 0.0)
    module = native.load("expert_ffn")
    module.gate_up(x, w13, experts, gate_up, h, call, situ, *caps)
    module.down(h, w2, experts, weights, down, y, call)
    return y


def _call(plan: GemvPlan, bank: ExpertBank, x: torch.Tensor) -> Any:
    """The launch parameters, in the order of the struct in expert_ffn.cu."""
    from tvm_ffi import Shape

    blocks, width = plan.blocks or _multiprocessors(x.get_device()), x.shape[1]
    down_warps = plan.down_warps or min(MOST_DOWN_WARPS, -(-width // blocks))
    down_blocks = max(blocks, -(-width // down_warps))
    return Shape((bank.first, bank.count, blocks, int(plan.chained), plan.warps, down_warps, down_blocks))

"""The experts of one FFN in three launches: gate and up with the activation, down, sum. See spec.py for shapes.

Up to a handful of tokens the shared expert rides in the first two; above, and beside CUDA kernels, it runs on the
model's own product.
"""

from collections.abc import Callable

import torch

from anabranch.config.model import ActivationConfig
from anabranch.ops.expert_sum.triton import expert_sum
from anabranch.ops.experts.plan import RIDER_TOKENS, Plan
from anabranch.ops.experts.reference import ExpertBank
from anabranch.ops.experts.triton import Rider, expert_products
from anabranch.ops.glu.triton import glu
from anabranch.ops.mxfp4 import cuda as mxfp4


def expert_ffn(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    bank: ExpertBank,
    activation: ActivationConfig,
    shared: tuple[torch.Tensor, torch.Tensor] | None,
    linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    latent: torch.Tensor | None = None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """routed + shared, or routed | shared.

    The shared expert has the bits of `linear` where it has launches of its own. They are those of riding where `linear`
    sums K in the segments of `ops/linear`: `linear/skinny` up to 64 tokens, if rows lie on 16 bytes and 256 divides K.
    """
    z = x if latent is None else latent
    width = 0 if latent is None else z.shape[1]
    y = torch.empty((len(x), width + x.shape[1]), dtype=x.dtype, device=x.device)
    if not len(x):
        return y
    # where the experts are latent the shared expert has columns of its own, else it is added by the sum
    own = y[:, width:] if width else torch.empty_like(y)
    rider = None
    if shared is not None and len(x) <= RIDER_TOKENS and (plan or not mxfp4.worth(z, experts.shape[1], bank)):
        rider = Rider(x=x, gate_up=shared[0], down=shared[1], out=own)
    out = expert_products(z, experts.contiguous(), bank, activation, plan, rider)
    if shared is None and width:
        own.zero_()
    elif shared is not None and rider is None:
        made = linear(glu(linear(x, shared[0]), activation), shared[1])
        own = own.copy_(made) if width else made
    added = None if width or shared is None else own
    expert_sum(out, weights, experts, bank.first, bank.count, y[:, : width or None], added)
    return y

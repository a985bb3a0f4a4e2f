"""Contracts of the router, alone and with the norm before it. T tokens, W width, E experts, k chosen."""

from anabranch.ops.norm.spec import ADD_RMS_NORM
from anabranch.ops.spec import OpSpec, tolerance

ROUTER = OpSpec(
    name="router",
    inputs={
        "x": "model dtype [T, hidden]: the full-width normed FFN input, also for latent MoE",
        "weight": "model dtype [E, hidden], multiplied in fp32",
        "bias": "fp32 [E] correction, used for choosing only",
        "moe": "MoeConfig: top_k, groups, top_groups, scoring, renormalize, scaling",
        "sync": "int32 [scratch_words(E)], zero, of one layer and one launch at a time, zero again afterwards; or None",
    },
    outputs={"weights": "fp32 [T, k]", "experts": "int64 [T, k]"},
    constraints=(
        "logits are never rounded below fp32",
        "a group scores the sum of its two largest biased scores",
        "triton: a token's bits do not depend on the batch",
        "cuda: they do not among 1 to FEW_TOKENS tokens; above it is triton, whose bits are others",
    ),
    # a logit is a sum over the hidden width in another order; the sigmoid and the renormalisation pass it on
    equality=tolerance(5e-6, 5e-6),
    source="model_spec section 6.2; DeepSeek-V3 noaux_tc, arXiv 2412.19437",
)

NORM_ROUTE = OpSpec(
    name="norm_route",
    inputs={
        "x, update": "model dtype [T, W], T from 1 to FEW_TOKENS; update None: x is the sum",
        "gain, eps": "weight [W] in the model dtype and eps of the norm",
        "weight, bias, moe, sync": "as router",
    },
    outputs={"total, y": "model dtype [T, W]: as add_rms_norm", "weights, experts": "as router, of y"},
    constraints=(
        "the sum is bitwise that of add_rms_norm",
        "y has the bits of the Triton add_rms_norm, its order of addition, where W is a multiple of 16 above 2048",
        "weights and experts have the bits of the cuda router on y",
    ),
    equality=ADD_RMS_NORM.equality,
    source="the operations it stands for",
)

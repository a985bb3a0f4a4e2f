"""Contract of the router. T tokens, E experts, k chosen."""

from anabranch.ops.spec import OpSpec, tolerance

ROUTER = OpSpec(
    name="router",
    inputs={
        "x": "model dtype [T, hidden]: the full-width normed FFN input, also for latent MoE",
        "weight": "model dtype [E, hidden], multiplied in fp32",
        "bias": "fp32 [E] correction, used for choosing only",
        "moe": "MoeConfig: top_k, groups, top_groups, scoring, renormalize, scaling",
        "sync": "int32 [1], zero, owned by one layer and zero again afterwards; None where there is none",
    },
    outputs={"weights": "fp32 [T, k]", "experts": "int64 [T, k]"},
    constraints=("logits are never rounded below fp32", "a group scores the sum of its two largest biased scores"),
    # a logit is a sum over the hidden width in another order; the sigmoid and the renormalisation pass it on
    equality=tolerance(5e-6, 5e-6),
    source="model_spec section 6.2; DeepSeek-V3 noaux_tc, arXiv 2412.19437",
)

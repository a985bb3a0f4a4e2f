"""Contract of the experts of one FFN. T tokens, V hidden width, W expert width, I and J inner widths, k chosen."""

from anabranch.ops.spec import OpSpec, tolerance

EXPERT_FFN = OpSpec(
    name="expert_ffn",
    inputs={
        "x": "model dtype [T, V]: what the shared expert reads, and the routed ones where `latent` is None",
        "weights": "fp32 [T, k]",
        "experts": "int64 [T, k], global indices, distinct within a token",
        "bank": "ExpertBank of the local experts",
        "activation": "ActivationConfig",
        "shared": "(gate|up [2*J, V], down [V, J]) in the model dtype with dense rows, or None",
        "linear": "the model's product: what the shared expert runs on where it has launches of its own",
        "latent": "model dtype [T, W] that the routed experts read, or None",
    },
    outputs={"y": "model dtype: [T, V] = round(routed) + shared, or with `latent` [T, W + V] routed | shared"},
    constraints=(
        "triton: the bits of the chain routed_experts, linear, glu, linear, add, where linear sums K in segments",
        "cuda, one token: rounded where the reference is; no plan changes a bit",
    ),
    equality=tolerance(2e-6, 1.5e-2),
    source="model_spec section 6.3",
)

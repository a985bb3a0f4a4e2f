"""Contract of the fused decode step. B requests, H local heads, D channels, P = H * D."""

from anabranch.ops.spec import OpSpec, tolerance

KDA_STEP = OpSpec(
    name="kda_step",
    inputs={
        "qkv": "model dtype [B, 3P] raw projection rows, any row stride",
        "conv_pool": "model dtype [slots, 3, 3P]; updated in place",
        "conv_weight": "fp32 [3P, 4]",
        "forget, gate": "model dtype [B, P], any row stride",
        "beta_logits": "model dtype [B, H], any row stride",
        "dt_bias, a_log, norm_weight": "fp32 [P], [H], [D]",
        "slots": "int64 [B]; -1 is no slot: pools untouched, output zero",
        "state": "fp32 or bf16 [slots, H, D, D], V-first; updated in place",
    },
    outputs={"y": "model dtype [B, P], normed and gated"},
    constraints=("rounds where the chain of separate operations rounds", "a slot appears at most once in a batch"),
    equality=tolerance(2e-6, 1.6e-2),
    source="model_spec sections 4.2 to 4.9",
)

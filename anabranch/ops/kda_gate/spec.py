"""Contract of the decay gate. T tokens, H local heads, D key channels a head."""

from anabranch.ops.spec import OpSpec, tolerance

KDA_GATE = OpSpec(
    name="kda_gate",
    inputs={
        "forget": "model dtype [T, H, D]: output of f_b",
        "dt_bias": "fp32 [H*D], one a channel",
        "a_log": "fp32 [H], one a head",
        "lower_bound": "None for softplus, or a negative number",
    },
    outputs={"g": "fp32 [T, H, D], <= 0"},
    constraints=("all in fp32", "softplus(x) is x above 20"),
    equality=tolerance(1e-6, 1e-6),
    source="model_spec section 4.4",
)

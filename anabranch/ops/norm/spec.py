"""Contracts of the norms. T tokens, W width, H heads, D channels a head."""

from anabranch.ops.spec import OpSpec, tolerance

RMS_NORM = OpSpec(
    name="rms_norm",
    inputs={"x": "model dtype [T, W], unit inner stride, any row stride", "weight": "model dtype or fp32 [W]"},
    outputs={"y": "model dtype [T, W], dense"},
    constraints=("statistics in fp32", "normalised value rounded to the model dtype before the weight"),
    equality=tolerance(1e-6, 8e-3),
    source="released Kimi-Linear modeling code; model_spec section 3",
)

ADD_RMS_NORM = OpSpec(
    name="add_rms_norm",
    inputs={"x, update": "model dtype [T, W], unit inner stride, any row stride", "weight": "as rms_norm"},
    outputs={"total": "model dtype [T, W], dense: x + update", "y": "model dtype [T, W], dense: rms_norm of total"},
    constraints=("the sum is rounded before it is normed", "BITWISE the two operations it stands for"),
    equality=RMS_NORM.equality,
    source="released Kimi-Linear modeling code: residual add, then norm",
)

GATED_RMS_NORM = OpSpec(
    name="gated_rms_norm",
    inputs={"x": "model dtype [T, H, D]", "gate": "model dtype [T, H*D], any row stride", "weight": "fp32 [D]"},
    outputs={"y": "model dtype [T, H*D], dense"},
    constraints=("norm, weight and sigmoid(gate) in fp32 with one rounding at the end",),
    equality=tolerance(1e-6, 8e-3),
    source="Kimi-Linear FusedRMSNormGated (sigmoid)",
)

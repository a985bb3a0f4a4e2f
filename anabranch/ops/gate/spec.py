"""Contract of the output gate. T tokens, W = local heads * value channels."""

from anabranch.ops.spec import BITWISE, OpSpec

GATE = OpSpec(
    name="gate",
    inputs={"x": "model dtype [T, W], dense", "g": "model dtype [T, W], unit inner stride, any row stride"},
    outputs={"y": "model dtype [T, W], dense"},
    constraints=("sigmoid rounded to the model dtype, then the product rounded again",),
    equality=BITWISE,
    source="released Kimi-K3 modeling code (linear, sigmoid, product, each in bf16)",
)

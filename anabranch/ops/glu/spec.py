"""Contract of the gated activation. T rows, I inner width."""

from anabranch.ops.spec import OpSpec, tolerance

GLU = OpSpec(
    name="glu",
    inputs={"gate_up": "model dtype [T, 2*I]: gate columns, then up columns", "activation": "ActivationConfig"},
    outputs={"y": "model dtype [T, I]"},
    constraints=("SiTU wholly in fp32 with one rounding; its sigmoid takes the uncapped gate",),
    equality=tolerance(1e-6, 8e-3),
    source="model_spec section 6.1",
)

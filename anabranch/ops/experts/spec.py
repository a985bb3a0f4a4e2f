"""Contract of the routed experts. T tokens, W expert width, I inner width, k chosen, E local experts."""

from anabranch.ops.spec import OpSpec, tolerance

EXPERTS = OpSpec(
    name="experts",
    inputs={
        "x": "model dtype [T, W]",
        "weights": "fp32 [T, k]",
        "experts": "int64 [T, k], global indices; those outside the local range are another rank's",
        "bank": "ExpertBank: gate_up(e) [2*I, W] and down(e) [W, I] of local expert e",
    },
    outputs={"y": "fp32 [T, W]: this rank's partial sum, not yet rounded"},
    constraints=("summed in fp32 in ascending expert order, whatever the batch",),
    equality=tolerance(2e-6, 1.5e-2),
    source="model_spec section 6.3",
)

"""Contract of the sum over experts. T tokens, W width, k chosen."""

from anabranch.ops.spec import BITWISE, OpSpec

EXPERT_SUM = OpSpec(
    name="expert_sum",
    inputs={
        "out": "model dtype [T * k, W]: row t*k + i is the i-th chosen expert's output for token t",
        "weights": "fp32 [T, k]",
        "experts": "int64 [T, k], global indices",
        "first, count": "the local range; rows of other experts are not read",
        "y": "[T, W] to write, model dtype or fp32, any row stride",
        "shared": "model dtype [T, W] to add, any row stride, or None",
    },
    outputs={"y": "round(sum) + shared, each rounded to the dtype of y"},
    constraints=("summed in fp32 in ascending expert order; a product and a sum round apart",),
    equality=BITWISE,
    source="model_spec section 6.3",
)

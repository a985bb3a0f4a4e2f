"""Contract of the residual read. T tokens, W hidden width, n banked rows."""

from anabranch.ops.spec import OpSpec, tolerance

ATTN_RESIDUAL = OpSpec(
    name="attn_residual",
    inputs={
        "prefix": "model dtype [T, W]: the running sum",
        "bank": "n tensors, model dtype [T, W]: frozen sums, oldest first",
        "norm": "model dtype [W]",
        "score": "model dtype [1, W]",
    },
    outputs={"y": "model dtype [T, W]; `prefix` itself when the bank is empty"},
    constraints=("scores from normed rows, values are the RAW rows", "softmax and mixture in fp32, no temperature"),
    equality=tolerance(1e-6, 8e-3),
    source="model_spec section 7",
)

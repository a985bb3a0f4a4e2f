"""Contract of the residual read. T tokens, W hidden width, n banked rows."""

from anabranch.ops.spec import OpSpec, tolerance

_ROWS = {
    "bank": "n tensors, model dtype [T, W]: frozen sums, oldest first",
    "norm": "model dtype [W]",
    "score": "model dtype [1, W]",
}

ATTN_RESIDUAL = OpSpec(
    name="residual_read",
    inputs={"prefix": "model dtype [T, W]: the running sum", **_ROWS},
    outputs={"y": "model dtype [T, W]; `prefix` itself when the bank is empty"},
    constraints=("scores from normed rows, values are the RAW rows", "softmax and mixture in fp32, no temperature"),
    equality=tolerance(1e-6, 8e-3),
    source="model_spec section 7",
)

RESIDUAL_NORM = OpSpec(
    name="residual_norm",
    inputs={
        "prefix": "model dtype [T, W]: the running sum",
        "update": "model dtype [T, W]: what it still lacks, or None",
        **_ROWS,
        "weight": "model dtype [W]: of the norm behind the read",
    },
    outputs={"total": "model dtype [T, W]: prefix + update, BITWISE", "y": "model dtype [T, W]: rms_norm of the read"},
    constraints=(*ATTN_RESIDUAL.constraints, "sum and read are each rounded to the model dtype before the next step"),
    # a read that rounds the other way is one step of the norm's input and one more of its output
    equality=tolerance(2e-6, 1.6e-2),
    source="model_spec section 7; released Kimi-K3 modeling code rounds before the norm",
)

"""Contract of the log softmax. W rows, V vocabulary."""

from anabranch.ops.spec import OpSpec, tolerance

LOG_SOFTMAX = OpSpec(
    name="log_softmax",
    inputs={"logits": "fp32 [W, V]"},
    outputs={"logprobs": "fp32 [W, V]"},
    equality=tolerance(1e-6, 1e-6),
    source="torch.log_softmax",
)

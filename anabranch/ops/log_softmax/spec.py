"""Contracts of the log softmax and of the greedy choice. W rows, V vocabulary."""

from anabranch.ops.spec import OpSpec, tolerance

LOG_SOFTMAX = OpSpec(
    name="log_softmax",
    inputs={"logits": "fp32 or model dtype [W, V]; widened to fp32 before anything else"},
    outputs={"logprobs": "fp32 [W, V]"},
    equality=tolerance(1e-6, 1e-6),
    source="torch.log_softmax",
)

PICK = OpSpec(
    name="pick",
    inputs={"logits": "fp32 or model dtype [W, V]; widened to fp32 before anything else"},
    outputs={
        "tokens": "int64 [W], the largest logit's, the lower index at a tie",
        "logprobs": "fp32 [W], its log probability; NaN where some logit of the row is not finite",
    },
    equality=tolerance(1e-6, 1e-6),
    source="torch.argmax, torch.log_softmax",
)

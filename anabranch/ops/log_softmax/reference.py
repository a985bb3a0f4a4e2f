"""Log softmax in plain PyTorch. See spec.py for shapes."""

from collections.abc import Callable

import torch

from anabranch.ops.arithmetic import row_sum


def widened(logits: torch.Tensor) -> torch.Tensor:
    """fp32, or fp64 where the logits are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def log_softmax(logits: torch.Tensor, total: Callable[[torch.Tensor], torch.Tensor] = row_sum) -> torch.Tensor:
    """logits - max - log(sum(exp(logits - max)))."""
    logits = widened(logits)
    shifted = logits - logits.amax(-1, keepdim=True)
    return shifted - torch.log(total(torch.exp(shifted))).unsqueeze(-1)


def pick(
    logits: torch.Tensor, total: Callable[[torch.Tensor], torch.Tensor] = row_sum
) -> tuple[torch.Tensor, torch.Tensor]:
    """The most probable token of each row and its log probability, NaN in a row that is not finite."""
    logits = widened(logits)
    peak = logits.amax(-1, keepdim=True)
    logprobs = 0.0 - torch.log(total(torch.exp(logits - peak)))
    return logits.argmax(-1), logprobs.masked_fill(~logits.isfinite().all(-1), float("nan"))

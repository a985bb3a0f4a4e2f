"""Log softmax in plain PyTorch. See spec.py for shapes."""

from collections.abc import Callable

import torch

from anabranch.ops.arithmetic import row_sum


def log_softmax(logits: torch.Tensor, total: Callable[[torch.Tensor], torch.Tensor] = row_sum) -> torch.Tensor:
    """logits - max - log(sum(exp(logits - max)))."""
    shifted = logits - logits.amax(-1, keepdim=True)
    return shifted - torch.log(total(torch.exp(shifted))).unsqueeze(-1)

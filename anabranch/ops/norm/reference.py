"""Norms in plain PyTorch. See spec.py for shapes."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x * rsqrt(mean(x^2) + eps), rounded to x's dtype, then times weight."""
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight.to(x.dtype)


def l2_norm(x: torch.Tensor) -> torch.Tensor:
    """Per head unit length in fp32: x / sqrt(sum(x^2) + 1e-6). The eps is added to the SUM, not to the mean."""
    x32 = x.float()
    return x32 * torch.rsqrt(x32.square().sum(-1, keepdim=True) + 1e-6)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over each head's channels times weight times sigmoid(gate): [T, H, D] -> [T, H*D]."""
    tokens, heads, dim = x.shape
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight.float()
    y = normed * torch.sigmoid(gate.reshape(tokens, heads, dim).float())
    return y.to(x.dtype).reshape(tokens, heads * dim)

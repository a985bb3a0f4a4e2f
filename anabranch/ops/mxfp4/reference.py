"""MXFP4 in plain PyTorch. See spec.py for shapes."""

import torch

GROUP = 32  # columns under one scale
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CODES = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)])
_SCALES = torch.tensor([2.0 ** (s - 127) for s in range(255)] + [float("nan")])


def dequantize(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Exact values: code times 2^(s-127)."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    values = _CODES.to(packed.device)[codes].unflatten(-1, (-1, GROUP))
    return (values * _SCALES.to(scale.device)[scale.long()].unsqueeze(-1)).flatten(-2).to(dtype)


def quantize(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest E2M1 codes (ties to even, saturating) under the OCP scale floor(log2(max)) - 2: (packed, scale)."""
    if w.shape[-1] % GROUP:
        raise ValueError(f"MXFP4 needs a multiple of {GROUP} columns, got {w.shape[-1]}")
    groups = w.float().unflatten(-1, (-1, GROUP))
    exponent = torch.frexp(groups.abs().amax(-1)).exponent - 1 - 2
    scale = torch.where(groups.abs().amax(-1) > 0, exponent + 127, 127).clamp(0, 254).to(torch.uint8)
    target = groups / _SCALES.to(w.device)[scale.long()].unsqueeze(-1)
    magnitudes = torch.tensor(_MAGNITUDES, device=w.device)
    # a tie between neighbours goes to the even code: halfway points belong to the lower code when that one is even
    halves = (magnitudes[:-1] + magnitudes[1:]) / 2
    above = torch.bucketize(target.abs().contiguous(), halves, right=True)
    below = torch.bucketize(target.abs().contiguous(), halves, right=False)
    code = torch.where((above != below) & (below % 2 == 0), below, above)
    code = (code + 8 * (target < 0)).flatten(-2).to(torch.uint8)
    return code[..., 0::2] | (code[..., 1::2] << 4), scale

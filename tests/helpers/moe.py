"""What tests of the FFN kernels share: activations, a small router, and rows between poison."""

import torch

from anabranch.config.model import ActivationConfig, MoeConfig

SILU = ActivationConfig(name="silu")
SITU = ActivationConfig(name="situ", beta=4.0, linear_beta=25.0)
MOE = MoeConfig(
    experts=20,
    top_k=3,
    shared_experts=1,
    intermediate_size=8,
    groups=1,
    top_groups=1,
    scoring="sigmoid",
    renormalize=True,
    scaling=2.446,
    latent_size=None,
    latent_norm=False,
)


def strided(rows: int, width: int, dtype: torch.dtype, spread: float = 1.0) -> torch.Tensor:
    """[rows, width] inside wider rows, at an odd place, between values that nobody may read."""
    wide = torch.full((rows, width + 20), torch.nan, dtype=dtype)
    wide[:, 7 : 7 + width] = torch.randn(rows, width) * spread
    return wide[:, 7 : 7 + width]

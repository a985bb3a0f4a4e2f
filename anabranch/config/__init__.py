"""Frozen, keyword-only configuration: what the model is, how it is laid out, how its projections are fused."""

from anabranch.config.fusion import FusionConfig
from anabranch.config.model import KdaConfig, MlaConfig, ModelConfig, MoeConfig
from anabranch.config.parallel import ParallelConfig

__all__ = ["FusionConfig", "KdaConfig", "MlaConfig", "ModelConfig", "MoeConfig", "ParallelConfig"]

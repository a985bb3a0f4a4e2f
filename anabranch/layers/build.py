"""What every layer is built from."""

from dataclasses import dataclass

import torch

from anabranch.config.model import ModelConfig
from anabranch.config.parallel import ParallelConfig
from anabranch.fusion.plan import FusionPlan
from anabranch.ops.registry import Ops
from anabranch.parallel.collectives import Collectives


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """One model's architecture, this rank's place and peers, the chosen paths and operations, and where it lives."""

    config: ModelConfig
    parallel: ParallelConfig
    plan: FusionPlan
    ops: Ops
    comm: Collectives
    dtype: torch.dtype
    device: torch.device | str | None

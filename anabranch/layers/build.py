"""What every layer is built from."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from anabranch.config.model import ModelConfig
from anabranch.config.parallel import ParallelConfig
from anabranch.fusion.fork import Branch
from anabranch.fusion.plan import FusionPlan
from anabranch.fusion.rules import FP8, Projection
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
    count_experts: bool = False  # keep counts of what each expert is given
    branch: Branch = field(default_factory=Branch)  # one side stream for all layers
    members: Mapping[str, Projection] = field(default_factory=dict)  # the layer's resolved projections, plain if absent

    def is_fp8(self, name: str) -> bool:
        """Whether the layer at hand holds its projection `name` in block-FP8."""
        return name in self.members and self.members[name].quantization == FP8

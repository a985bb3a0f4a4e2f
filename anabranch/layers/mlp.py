"""The gated MLP: dense layers and shared experts."""

import torch

from anabranch.fusion.buffer import MergedOwner, MergedWeight, Segment
from anabranch.layers.batch import Batch
from anabranch.layers.build import Build
from anabranch.layers.linear import Linear, share


class Mlp(MergedOwner):
    """down(act(gate x, up x)) over this rank's slice of the inner width."""

    def __init__(self, build: Build, inner: int) -> None:
        super().__init__()
        local, hidden = share(inner, build.parallel.tp_size, "MLP inner width"), build.config.hidden_size
        self.activation, self.ops = build.config.activation, build.ops
        parts = [Segment("gate_proj", local), Segment("up_proj", local)]
        self.gate_up = MergedWeight(parts, (hidden,), dtype=build.dtype, device=build.device)
        self.down_proj = Linear(build, local, hidden)

    @property
    def matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """gate|up [2*I, hidden] and down [hidden, I]."""
        return self.gate_up.buffer, self.down_proj.weight

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum over the tp group."""
        return self.down_proj(self.ops.glu(self.ops.linear(x, self.gate_up.buffer), self.activation))


class DenseFfn(Mlp):
    """The dense FFN of the first layers, over the rows of all attention replicas; its output is complete."""

    def __init__(self, build: Build) -> None:
        super().__init__(build, build.config.intermediate_size)
        self.comm = build.comm

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        rows = self.comm.gather_rows(x, batch.counts)
        return self.comm.sum_rows(self.partial(rows), batch.counts)

"""The gated MLP: dense layers and shared experts."""

import torch

from anabranch.fusion.buffer import MergedOwner, MergedWeight, Segment
from anabranch.layers.build import Build
from anabranch.layers.linear import Linear, share


class Mlp(MergedOwner):
    """down(act(gate x, up x)) over this rank's slice of the inner width; `forward` returns the PARTIAL sum."""

    def __init__(self, build: Build, inner: int) -> None:
        super().__init__()
        local, hidden = share(inner, build.parallel.tp_size, "MLP inner width"), build.config.hidden_size
        self.activation, self.ops = build.config.activation, build.ops
        parts = [Segment("gate_proj", local), Segment("up_proj", local)]
        self.gate_up = MergedWeight(parts, (hidden,), dtype=build.dtype, device=build.device)
        self.down_proj = Linear(build, local, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.ops.glu(self.ops.linear(x, self.gate_up.buffer), self.activation))


class DenseFfn(Mlp):
    """The dense FFN of the first layers: an Mlp whose output is complete over the tp group."""

    def __init__(self, build: Build) -> None:
        super().__init__(build, build.config.intermediate_size)
        self.comm = build.comm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.comm.all_reduce(super().forward(x), "tp")

"""The gated MLP: dense layers and shared experts."""

import torch

from anabranch.config.model import ModelConfig
from anabranch.config.parallel import ParallelConfig
from anabranch.fusion.buffer import MergedOwner, MergedWeight, Segment
from anabranch.layers.linear import Linear, share
from anabranch.ops.glu.reference import glu
from anabranch.parallel.collectives import Collectives


class Mlp(MergedOwner):
    """down(act(gate x, up x)) over this rank's slice of the inner width; `forward` returns the PARTIAL sum."""

    def __init__(
        self,
        config: ModelConfig,
        inner: int,
        parallel: ParallelConfig,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        local = share(inner, parallel.tp_size, "MLP inner width")
        self.activation = config.activation
        parts = [Segment("gate_proj", local), Segment("up_proj", local)]
        self.gate_up = MergedWeight(parts, (config.hidden_size,), dtype=dtype, device=device)
        self.down_proj = Linear(local, config.hidden_size, dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(glu(torch.nn.functional.linear(x, self.gate_up.buffer), self.activation))


class DenseFfn(Mlp):
    """The dense FFN of the first layers: an Mlp whose output is complete over the tp group."""

    def __init__(
        self,
        config: ModelConfig,
        parallel: ParallelConfig,
        comm: Collectives,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__(config, config.intermediate_size, parallel, dtype, device)
        self.comm = comm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.comm.all_reduce(super().forward(x), "tp")

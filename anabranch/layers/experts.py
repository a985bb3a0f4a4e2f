"""Where routed-expert weights live: stacked buffers, plain or MXFP4-packed, with per-expert checkpoint names."""

from collections.abc import Iterator

import torch
from torch import nn

from anabranch.fusion.buffer import NamedViews
from anabranch.layers.build import Build
from anabranch.layers.linear import frozen, share
from anabranch.ops.mxfp4.reference import GROUP, dequantize


class _Experts(NamedViews):
    """Local experts `first .. first + count`: whole experts over ep, their inner width over tp / ep.

    Views are named as checkpoints name experts: w1 gate, w3 up, w2 down.
    """

    def __init__(self, build: Build) -> None:
        super().__init__()
        config, parallel = build.config, build.parallel
        assert config.moe is not None
        self.total = config.moe.experts
        self.count = share(self.total, parallel.ep_size, "num_experts")
        self.first = parallel.ep_rank * self.count
        self.inner = share(config.moe.intermediate_size, parallel.moe_tp_size, "moe_intermediate_size")
        self.width = config.moe.latent_size or config.hidden_size


class PlainExperts(_Experts):
    """gate|up [E, 2*I, W] and down [E, W, I] in the model dtype."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.w13 = frozen(self.count, 2 * self.inner, self.width, dtype=build.dtype, device=build.device)
        self.w2 = frozen(self.count, self.width, self.inner, dtype=build.dtype, device=build.device)

    def gate_up(self, expert: int) -> torch.Tensor:
        return self.w13[expert]

    def down(self, expert: int) -> torch.Tensor:
        return self.w2[expert]

    def views(self) -> Iterator[tuple[str, torch.Tensor]]:
        for e in range(self.count):
            gate, up = self.w13[e].split(self.inner)
            for part, view in (("w1", gate), ("w2", self.w2[e]), ("w3", up)):
                yield f"{self.first + e}.{part}.weight", view


class Mxfp4Experts(_Experts):
    """The packed checkpoint bytes as they are; an expert is dequantised, exactly, when it is used."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        for what, size in (("expert width", self.width), ("local moe_intermediate_size", self.inner)):
            share(size, GROUP, f"MXFP4 {what}")
        self.dtype = build.dtype

        def codes(rows: int, columns: int) -> tuple[nn.Parameter, nn.Parameter]:
            return (
                frozen(self.count, rows, columns // 2, dtype=torch.uint8, device=build.device),
                frozen(self.count, rows, columns // GROUP, dtype=torch.uint8, device=build.device),
            )

        self.w13_packed, self.w13_scale = codes(2 * self.inner, self.width)
        self.w2_packed, self.w2_scale = codes(self.width, self.inner)

    def gate_up(self, expert: int) -> torch.Tensor:
        return dequantize(self.w13_packed[expert], self.w13_scale[expert], self.dtype)

    def down(self, expert: int) -> torch.Tensor:
        return dequantize(self.w2_packed[expert], self.w2_scale[expert], self.dtype)

    def views(self) -> Iterator[tuple[str, torch.Tensor]]:
        for e in range(self.count):
            for kind in ("packed", "scale"):
                gate, up = getattr(self, f"w13_{kind}")[e].split(self.inner)
                for part, view in (("w1", gate), ("w2", getattr(self, f"w2_{kind}")[e]), ("w3", up)):
                    yield f"{self.first + e}.{part}.weight_{kind}", view

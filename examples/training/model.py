"""The package's layers as a model that learns: [rows, length] token ids in, logits of every token out."""

import math
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from anabranch.config.fusion import FusionConfig
from anabranch.config.model import ModelConfig
from anabranch.config.parallel import ParallelConfig
from anabranch.engine.cache import PAGE
from anabranch.fusion.plan import make_plan
from anabranch.layers.batch import Batch, KdaState, LatentPages, LayerCache
from anabranch.layers.build import Build
from anabranch.layers.linear import VocabHead
from anabranch.layers.moe import Router
from anabranch.models.kimi import KimiModel
from anabranch.models.weights import leaf_of
from anabranch.ops.segments import Segments
from anabranch.parallel.collectives import SingleRank

from .ops import training_ops

# zeroed where training starts from an even mixture or from nothing
_ZERO = ("e_score_correction_bias", "A_log", "self_attention_res_proj", "mlp_res_proj", "output_attn_res_proj")
# set by load, and read of nothing: the first layer's input has no bank beside it
_FIXED = ("e_score_correction_bias", "layers.0.self_attention_res_")
_OUTPUTS = ("o_proj", "down_proj", "w2", "routed_expert_up_proj")


class Trainable(nn.Module):
    """Parameters and state-dict names are those of KimiForCausalLM; gradients are on where a loss has one.

    Args:
        config: a Kimi-K3 with plain experts.
        rows, length: shape of every batch of tokens.
        dtype: model dtype, in which it will be served; masters are the optimizer's.
        compiled, fla: as in `training_ops`.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        length: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        compiled: bool = False,
        fla: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.shape, self.dtype, self.device = config, (rows, length), dtype, torch.device(device)
        name = str(dtype).removeprefix("torch.")
        # one GEMM a projection width: a side stream would gain nothing at thousands of tokens
        plan = make_plan(config, FusionConfig(kda="whole", mla="merged"), name, device=device)
        ops = training_ops(config, rows, length, compiled=compiled, fla=fla)
        build = Build(
            config=config, parallel=ParallelConfig(), plan=plan, ops=ops, comm=SingleRank(), dtype=dtype, device=device
        )
        self.model, self.lm_head = KimiModel(build), VocabHead(build)
        for key, parameter in self.named_parameters():
            parameter.requires_grad_(not any(part in key for part in _FIXED))
        self.batch = self._whole_rows()
        self.routers = [module for module in self.modules() if isinstance(module, Router)]
        self.load = torch.zeros(len(self.routers), config.moe.experts if config.moe else 0, device=device)
        for index, router in enumerate(self.routers):
            router.register_forward_hook(self._count(index))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens int64 [rows, length] -> fp32 logits [rows * length, vocab]; every row starts from empty states."""
        return self.lm_head(self.model(replace(self.batch, tokens=tokens.flatten()), self._caches()))

    @torch.no_grad()
    def balance(self, rate: torch.Tensor | float) -> None:
        """Raise the choice bias of experts that got less than their share of the last batch, lower the others'."""
        mean = self.load.mean(-1, keepdim=True)
        for router, step in zip(self.routers, torch.sign(mean - self.load) * rate, strict=True):
            router.e_score_correction_bias.add_(step)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Seeded weights: unit norms, decays from a few tokens to thousands, quiet outputs, an even residual read."""
        generator = torch.Generator().manual_seed(seed)
        for buffer in self.parameters():
            buffer.zero_()  # padding rows too
        for name, view in self.state_dict().items():
            view.copy_(_initial(leaf_of(name), view.shape, generator))

    def _count(self, index: int) -> Any:
        def hook(router: Router, inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
            with torch.no_grad():
                chosen = output[1].flatten()
                self.load[index].zero_().index_add_(0, chosen, torch.ones_like(chosen, dtype=self.load.dtype))

        return hook

    def _whole_rows(self) -> Batch:
        rows, length = self.shape
        segments, tokens = Segments.of([length] * rows, device=self.device), rows * length
        return Batch(
            tokens=torch.zeros(tokens, dtype=torch.long, device=self.device),
            segments=segments,
            prefill=segments,
            decodes=0,
            slots=torch.arange(rows, device=self.device),
            block_table=torch.zeros(rows, 1, dtype=torch.long, device=self.device),
            rows=torch.arange(tokens, device=self.device),
            wanted=cast(torch.Tensor, slice(None)),  # all of them, as views
        )

    def _caches(self) -> list[LayerCache]:
        """Latent pages are made anew, as autograd follows what is written into them; recurrent pools are not used."""
        config, none = self.config, torch.zeros(0, device=self.device)
        pages = -(-self.shape[0] * self.shape[1] // PAGE) + 1
        size = (pages, PAGE, config.mla.latent_dim)
        return [
            KdaState(none, none)
            if kind == "kda"
            else LatentPages(torch.zeros(size, dtype=self.dtype, device=self.device))
            for kind in config.layer_kinds
        ]


def _initial(leaf: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    normal = torch.randn(shape, generator=generator)
    if leaf.endswith("norm"):
        return torch.ones(shape)
    if leaf in _ZERO:
        return torch.zeros(shape)
    if leaf == "dt_bias":  # per-token log decay from -0.002 to -0.9
        return torch.empty(shape).uniform_(-8, -1.5, generator=generator)
    if leaf.endswith("conv1d"):
        taps = 0.2 * normal
        taps[..., -1] += 0.7
        return taps
    if leaf in ("embed_tokens", "lm_head"):
        return normal * (0.3 if leaf == "embed_tokens" else 0.02)
    return normal * (0.3 if leaf in _OUTPUTS else 0.6) / math.sqrt(shape[-1])

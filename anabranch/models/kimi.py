"""Kimi-Linear and the Kimi-K3 text backbone: one causal language model, assembled from layers."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from anabranch.config.fusion import FusionConfig
from anabranch.config.model import ModelConfig
from anabranch.config.parallel import ParallelConfig
from anabranch.fusion.plan import make_plan
from anabranch.layers.batch import Batch, LayerCache
from anabranch.layers.build import Build
from anabranch.layers.kda import KdaLayer
from anabranch.layers.linear import Linear, RMSNorm, VocabEmbedding, VocabHead
from anabranch.layers.mla import MlaLayer
from anabranch.layers.mlp import DenseFfn
from anabranch.layers.moe import MoeFfn
from anabranch.layers.residual import Stream
from anabranch.ops.registry import select
from anabranch.parallel.collectives import Collectives, SingleRank
from anabranch.parallel.layout import stage_layers


class DecoderLayer(nn.Module):
    """h + Attn(norm h), then h + FFN(norm h)."""

    def __init__(self, build: Build, index: int) -> None:
        super().__init__()
        config = build.config
        self.input_layernorm = RMSNorm(build, config.hidden_size)
        attention = KdaLayer if config.layer_kinds[index] == "kda" else MlaLayer
        self.self_attn = attention(replace(build, members=build.plan.layers[index]))
        self.post_attention_layernorm = RMSNorm(build, config.hidden_size)
        # checkpoints name the FFN after its kind
        self.ffn_name = "block_sparse_moe" if config.moe_layers[index] else "mlp"
        self.add_module(self.ffn_name, (MoeFfn if config.moe_layers[index] else DenseFfn)(build))

    def forward(self, stream: Stream, batch: Batch, cache: LayerCache) -> None:
        """Adds this layer's two updates to the stream."""
        stream.add(self.self_attn(self.read_for_attention(stream), batch, cache))
        stream.add(self.feed(stream, batch))

    def feed(self, stream: Stream, batch: Batch) -> torch.Tensor:
        """The FFN's update; a few rows are normed and routed in one launch."""
        ffn = getattr(self, self.ffn_name)
        if isinstance(ffn, MoeFfn) and ffn.gate.norms(len(batch.tokens)):
            x, routing = stream.routed(self.post_attention_layernorm, ffn.gate)
            return ffn(x, batch, routing)
        return ffn(self.read_for_ffn(stream), batch)

    def read_for_attention(self, stream: Stream) -> torch.Tensor:
        return stream.normed(self.input_layernorm)

    def read_for_ffn(self, stream: Stream) -> torch.Tensor:
        return stream.normed(self.post_attention_layernorm)


class BlockResidualLayer(DecoderLayer):
    """A decoder layer that reads a learned mixture of the banked sums; every block starts by banking the sum."""

    def __init__(self, build: Build, index: int) -> None:
        super().__init__(build, index)
        config = build.config
        assert config.attn_res_block is not None
        self.starts_block = index % config.attn_res_block == 0
        self.self_attention_res_norm = RMSNorm(build, config.hidden_size)
        self.self_attention_res_proj = Linear(build, config.hidden_size, 1)
        self.mlp_res_norm = RMSNorm(build, config.hidden_size)
        self.mlp_res_proj = Linear(build, config.hidden_size, 1)

    def read_for_attention(self, stream: Stream) -> torch.Tensor:
        x = stream.mixed(self.self_attention_res_norm, self.self_attention_res_proj, self.input_layernorm)
        if self.starts_block:  # after the read: the sum takes part in it as the newest source
            stream.freeze()
        return x

    def read_for_ffn(self, stream: Stream) -> torch.Tensor:
        return stream.mixed(self.mlp_res_norm, self.mlp_res_proj, self.post_attention_layernorm)


class KimiModel(nn.Module):
    """Embedding, this stage's decoder layers, final norm."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        config, parallel = build.config, build.parallel
        hidden = config.hidden_size
        self.stage = stage_layers(config.layers, parallel.pp_size, parallel.pp_rank)
        self.comm, self.layer_count, self.input_width, self.dtype = build.comm, config.layers, hidden, build.dtype
        self.reads_bank = config.attn_res_block is not None
        # every block that started in an earlier stage has banked one sum
        self.banked = -(-self.stage.start // config.attn_res_block) if config.attn_res_block else 0
        if self.stage.start == 0:
            self.embed_tokens = VocabEmbedding(build)
        layer = BlockResidualLayer if self.reads_bank else DecoderLayer
        self.layers = nn.ModuleDict({str(i): layer(build, i) for i in self.stage})
        if self.stage.stop == config.layers:
            if self.reads_bank:
                self.output_attn_res_norm = RMSNorm(build, hidden)
                self.output_attn_res_proj = Linear(build, hidden, 1)
            self.norm = RMSNorm(build, hidden)

    def forward(self, batch: Batch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Final hidden states of `batch.wanted`: [W, hidden]; [0, hidden] of a stage that hands on."""
        stream = self._receive(batch) if self.stage.start else Stream(self.embed_tokens(batch.tokens))
        for layer, cache in zip(self.layers.values(), caches, strict=True):
            layer(stream, batch, cache)
        if self.stage.stop < self.layer_count:
            self.comm.send(torch.stack([stream.sum, *stream.bank]))
            return stream.sum[:0]
        last = stream if batch.wanted is None else stream.at(batch.wanted)
        if self.reads_bank:
            return last.mixed(self.output_attn_res_norm, self.output_attn_res_proj, self.norm)
        return last.normed(self.norm)

    def _receive(self, batch: Batch) -> Stream:
        """The sum and the banked sums of the previous stage, as one tensor [1 + banked, T, hidden]."""
        shape = (1 + self.banked, len(batch.tokens), self.input_width)
        rows = torch.empty(shape, dtype=self.dtype, device=batch.tokens.device)
        prefix, *bank = self.comm.receive(rows)
        return Stream(prefix, bank)


class KimiForCausalLM(nn.Module):
    """The whole language model of one rank; parameter names equal the checkpoint's.

    Args:
        config: architecture.
        parallel: this rank's place; shapes are those of its shard.
        fusion: path per layer kind.
        comm: peers; without any, sums and gathers are this rank's own.
        dtype: model dtype (norm statistics, states, gates and router scores are fp32 regardless).
        device: where parameters are allocated, uninitialised; "meta" allocates nothing.

        deterministic: use batch-invariant operations only.
        ops: implementation wishes, operation name -> implementation name.
        adapted: official names of the modules that will carry a LoRA adapter (models/lora.py).
        count_experts: keep counts of what each expert is given; see `expert_load`.

    Raises:
        ValueError: a size does not divide over the ranks, or an explicit fusion path or operation is refused.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        parallel: ParallelConfig | None = None,
        fusion: FusionConfig | None = None,
        comm: Collectives | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        deterministic: bool = False,
        ops: Mapping[str, str] | None = None,
        adapted: Collection[str] = (),
        count_experts: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.parallel, self.dtype = config, parallel or ParallelConfig(), dtype
        self.selection = select(
            config,
            torch.device(device or "cpu"),
            dtype=dtype,
            deterministic=deterministic,
            replicas=self.parallel.dp_size,
            wishes=ops,
        )
        self.plan = make_plan(
            config,
            fusion or FusionConfig(),
            str(dtype).removeprefix("torch."),
            parallel=self.parallel,
            device=device,
            deterministic=deterministic,
            adapted=adapted,
            step=self.selection.chosen["kda_step"][0],
        )
        self.ops, self.deterministic = self.selection.ops, deterministic
        build = Build(
            config=config,
            parallel=self.parallel,
            plan=self.plan,
            ops=self.ops,
            comm=comm or SingleRank(),
            dtype=dtype,
            device=device,
            count_experts=count_experts,
        )
        self.model = KimiModel(build)
        if self.model.stage.stop == config.layers:
            self.lm_head = VocabHead(build)

    def forward(self, batch: Batch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Logits [W, vocab] of `batch.wanted`, in the model dtype, or no row of a stage that hands on.

        Caches (one for each layer of the stage) are updated in place.
        """
        hidden = self.model(batch, caches)
        if self.model.stage.stop < self.config.layers:
            return hidden.new_empty(0, self.config.vocab_size)
        return self.lm_head(hidden)

    def expert_load(self) -> dict[int, list[int]]:
        """Layer -> tokens of this rank's replica that each expert was given; empty if they are not counted."""
        layers = {int(i): getattr(layer, str(layer.ffn_name)) for i, layer in self.model.layers.items()}
        return {i: ffn.load.read() for i, ffn in layers.items() if isinstance(ffn, MoeFfn) and ffn.load is not None}

"""The NoPE latent-attention layer, with and without q_lora and output gate."""

from contextlib import closing

import torch

from anabranch.fusion.buffer import MergedOwner, Segment
from anabranch.fusion.mla_paths import mla_paths
from anabranch.fusion.prologue import KV_A, MlaWeights, Prologue
from anabranch.layers.batch import Batch, LatentPages
from anabranch.layers.build import Build
from anabranch.layers.linear import Linear, RMSNorm, input_weight, share


class MlaLayer(MergedOwner):
    """MLA over the local heads of one attention-TP rank (model_spec section 5). The latent cache is replicated."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        mla, hidden = build.config.mla, build.config.hidden_size
        self.config, self.ops, self.comm = mla, build.ops, build.comm
        self.heads = share(mla.heads, build.parallel.attn_tp_size, "MLA heads (num_attention_heads)")
        query = self.heads * mla.qk_dim
        q = Segment("q_a_proj", mla.q_lora_rank) if mla.q_lora_rank else Segment("q_proj", query)
        segments = [q, Segment(KV_A, mla.latent_dim)]
        if mla.output_gate:
            segments.append(Segment("g_proj", self.heads * mla.v_dim))
        # in block-FP8 the gate comes first: its rows fill whole scale blocks, those of kv_a do not
        fp8_first = sorted(segments, key=lambda s: s.name != "g_proj") if build.is_fp8("g_proj") else segments
        merged = input_weight(self, fp8_first, build)
        if mla.q_lora_rank:
            self.q_a_layernorm = RMSNorm(build, mla.q_lora_rank, mla.norm_eps)
            self.q_b_proj = Linear(build, mla.q_lora_rank, query, "q_b_proj")
        self.kv_a_layernorm = RMSNorm(build, mla.kv_lora_rank, mla.norm_eps)
        self.kv_b_proj = Linear(build, mla.kv_lora_rank, self.heads * (mla.nope_dim + mla.v_dim))
        self.o_proj = Linear(build, self.heads * mla.v_dim, hidden, "o_proj")
        paths, weights = mla_paths(mla.output_gate), MlaWeights(merged, build.ops, build.branch)
        self.prologue = Prologue("mla", weights, lambda rows, moment: paths[build.plan.mla.pick(rows, moment)])

    def forward(self, x: torch.Tensor, batch: Batch, cache: LatentPages) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden], complete over the attention-TP group."""
        with closing(self.prologue(x, batch.moment)) as inputs:
            q = self.q_b_proj(self.q_a_layernorm(inputs.q)) if self.config.q_lora_rank else inputs.q
            self._write(inputs.kv, batch, cache.pages)
            o = self._attend(q.unflatten(-1, (self.heads, self.config.qk_dim)), batch, cache.pages)
            if inputs.gate is not None:
                o = self.ops.sigmoid_gate(o, inputs.gate.take())
        return self.comm.all_reduce(self.o_proj(o), "attn_tp")

    def _write(self, kv: torch.Tensor, batch: Batch, pages: torch.Tensor) -> None:
        """Cache rows are the NORMED latent and the raw shared key."""
        latent, shared = kv.split([self.config.kv_lora_rank, self.config.rope_dim], -1)
        rows = torch.cat([self.kv_a_layernorm(latent), shared], -1)
        flat = pages.view(-1, pages.shape[-1])
        # a fixed number of writes, so that it can be captured: tokens without a row land in the page nobody reads
        target = torch.where(batch.rows >= 0, batch.rows, flat.shape[0] - 1)
        flat.index_copy_(0, target, rows.to(pages.dtype))

    def _attend(self, q: torch.Tensor, batch: Batch, pages: torch.Tensor) -> torch.Tensor:
        """Absorbed form for the decode tokens, explicit form for the prefill segments: [T, H * v]."""
        n, kv_b = batch.decodes, self.kv_b_proj.weight.unflatten(0, (self.heads, -1))
        parts = []
        if n:
            parts.append(self.ops.mla_decode(q[:n], batch.segments.ends[:n], batch.block_table[:n], pages, kv_b))
        if batch.prefill:
            parts.append(self.ops.mla_prefill(q[n:], batch.prefill, batch.block_table[n:], pages, kv_b))
        return torch.cat(parts)

"""The NoPE latent-attention layer, with and without q_lora and output gate."""

from contextlib import closing

import torch

from anabranch.fusion.buffer import MergedOwner, Segment
from anabranch.fusion.mla_paths import mla_paths
from anabranch.fusion.prologue import KV_A, MlaInputs, MlaWeights, Prologue
from anabranch.layers.batch import Batch, LatentPages, joined
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
            q = q.unflatten(-1, (self.heads, self.config.qk_dim))
            whole = self.ops.mla_step is not None and batch.single[0] == len(q) > 0
            o = (self._step if whole else self._chain)(q, inputs, batch, cache.pages)
        return self.comm.all_reduce(self.o_proj(o), "attn_tp")

    def _step(self, q: torch.Tensor, inputs: MlaInputs, batch: Batch, pages: torch.Tensor) -> torch.Tensor:
        """Tokens that are taken one by one, from raw projections to gated outputs in one operation: [B, H * v].

        Early reads: lengths, tables and rows of past steps are complete, as the first norm of the pass, behind them,
        was launched plainly; without `sees` no two tokens share a sequence, so that one sees no row of this step but
        its own.
        """
        assert self.ops.mla_step is not None
        norm, gate, (_, sees) = self.kv_a_layernorm, inputs.gate, batch.single
        return self.ops.mla_step(
            *(q, inputs.kv, norm.weight, norm.eps, batch.rows, sees, batch.block_table, pages),
            *(self._kv_b, None if gate is None else gate.take),
            early=batch.sees is None,
        )

    def _chain(self, q: torch.Tensor, inputs: MlaInputs, batch: Batch, pages: torch.Tensor) -> torch.Tensor:
        """Cache write, attention and gate as the operations they are: [T, H * v]."""
        self._write(inputs.kv, batch, pages)
        o = self._attend(q, batch, pages)
        return o if inputs.gate is None else self.ops.sigmoid_gate(o, inputs.gate.take())

    def _write(self, kv: torch.Tensor, batch: Batch, pages: torch.Tensor) -> None:
        """Cache rows are the NORMED latent and the raw shared key."""
        norm = self.kv_a_layernorm
        self.ops.mla_write(kv, norm.weight, norm.eps, batch.rows, pages)

    def _attend(self, q: torch.Tensor, batch: Batch, pages: torch.Tensor) -> torch.Tensor:
        """Absorbed form for tokens that are taken one by one, explicit form for the others' segments: [T, H * v]."""
        (n, sees), ops, parts = batch.single, self.ops, []
        if n:
            parts.append(ops.mla_decode(q[:n], sees[:n], batch.block_table[:n], pages, self._kv_b))
        if n < len(q):
            parts.append(ops.mla_prefill(q[n:], batch.prefill, batch.block_table[n:], pages, self._kv_b))
        return joined(parts)

    @property
    def _kv_b(self) -> torch.Tensor:
        """Key rows, then value rows, of each head: [H, nope + v, rank]."""
        return self.kv_b_proj.weight.unflatten(0, (self.heads, -1))

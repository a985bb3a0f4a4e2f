"""The Kimi Delta Attention layer, from normed input to this replica's summed output."""

import torch

from anabranch.fusion.buffer import PAD_ROWS, MergedOwner, MergedWeight, Segment
from anabranch.fusion.prologue import KdaWeights, Prologue, kda_paths
from anabranch.layers.batch import Batch, KdaState
from anabranch.layers.build import Build
from anabranch.layers.linear import Linear, RMSNorm, frozen, share
from anabranch.ops.arithmetic import sigmoid


class KdaLayer(MergedOwner):
    """KDA over the local heads of one attention-TP rank (model_spec section 4)."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        kda, hidden, dtype, device = build.config.kda, build.config.hidden_size, build.dtype, build.device
        self.config, self.eps, self.ops, self.comm = kda, build.config.rms_norm_eps, build.ops, build.comm
        self.heads = share(kda.heads, build.parallel.attn_tp_size, "KDA heads (num_heads)")
        self.width = self.heads * kda.head_dim
        wide, rank = [Segment(f"{n}_proj", self.width) for n in "qkv"], kda.head_dim
        beta = Segment("b_proj", self.heads)
        if kda.full_rank_gate:
            segments = [*wide, Segment("g_proj", self.width), Segment("f_a_proj", rank), beta]
            second = [Segment("f_b_proj", self.width)]
        else:
            segments = [*wide, Segment("f_a_proj", rank), Segment("g_a_proj", rank), beta]
            second = [Segment("f_b_proj", self.width), Segment("g_b_proj", self.width)]
        self.in_proj = MergedWeight(segments, (hidden,), pad_to=PAD_ROWS, dtype=dtype, device=device)
        self.second = MergedWeight(second, (rank,), dtype=dtype, device=device)
        taps = [Segment(f"{n}_conv1d", self.width) for n in "qkv"]
        self.conv = MergedWeight(taps, (1, kda.conv_size), dtype=torch.float32, device=device)
        self.A_log = frozen(self.heads, dtype=torch.float32, device=device)
        self.dt_bias = frozen(self.width, dtype=torch.float32, device=device)
        self.o_norm = RMSNorm(build, kda.head_dim, dtype=torch.float32)
        self.o_proj = Linear(build, self.width, hidden)
        path = kda_paths(kda.full_rank_gate)[build.plan.kda.path]
        self.prologue = Prologue("kda", KdaWeights(self.in_proj, self.second, build.ops), lambda rows: path)

    def forward(self, x: torch.Tensor, batch: Batch, cache: KdaState) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden], complete over the attention-TP group."""
        inputs = self.prologue(x)
        qkv = self.ops.conv(inputs.qkv, batch.segments, batch.slots, cache.conv, self.conv.buffer.squeeze(1))
        heads = (self.heads, self.config.head_dim)
        q, k, v = (part.unflatten(-1, heads) for part in qkv.split(self.width, -1))
        g = self.ops.log_decay(
            inputs.forget.unflatten(-1, heads), self.dt_bias, self.A_log, self.config.gate_lower_bound
        )
        q, k, beta = self.ops.l2_norm(q), self.ops.l2_norm(k), sigmoid(inputs.beta.float())
        o = self._delta_rule(q, k, v, g, beta, batch, cache.state)
        y = self.ops.gated_rms_norm(o, inputs.gate, self.o_norm.weight, self.eps)
        return self.comm.all_reduce(self.o_proj(y), "attn_tp")

    def _delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        batch: Batch,
        state: torch.Tensor,
    ) -> torch.Tensor:
        """Recurrent form for the decode tokens, chunk form for the prefill segments: [T, H, D]."""
        n, parts = batch.decodes, []
        if n:
            parts.append(self.ops.kda_decode(q[:n], k[:n], v[:n], g[:n], beta[:n], batch.slots[:n], state))
        if batch.prefill:
            tokens = (q[n:], k[n:], v[n:], g[n:], beta[n:])
            parts.append(self.ops.kda_prefill(*tokens, batch.prefill, batch.slots[n:], state))
        return torch.cat(parts)

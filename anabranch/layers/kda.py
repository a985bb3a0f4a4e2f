"""The Kimi Delta Attention layer, from normed input to this replica's summed output."""

import torch

from anabranch.config.model import ModelConfig
from anabranch.config.parallel import ParallelConfig
from anabranch.fusion.buffer import PAD_ROWS, MergedOwner, MergedWeight, Segment
from anabranch.fusion.plan import FusionPlan
from anabranch.fusion.prologue import KdaWeights, Prologue, kda_paths
from anabranch.layers.batch import Batch, KdaState
from anabranch.layers.linear import Linear, RMSNorm, frozen, share
from anabranch.ops.conv.reference import conv
from anabranch.ops.kda_decode.reference import kda_decode
from anabranch.ops.kda_gate.reference import log_decay
from anabranch.ops.kda_prefill.reference import kda_prefill
from anabranch.ops.norm.reference import gated_rms_norm, l2_norm
from anabranch.parallel.collectives import Collectives


class KdaLayer(MergedOwner):
    """KDA over the local heads of one attention-TP rank (model_spec section 4)."""

    def __init__(
        self,
        config: ModelConfig,
        parallel: ParallelConfig,
        plan: FusionPlan,
        comm: Collectives,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        kda = config.kda
        self.config, self.eps, self.comm = kda, config.rms_norm_eps, comm
        self.heads = share(kda.heads, parallel.attn_tp_size, "KDA heads (num_heads)")
        self.width = self.heads * kda.head_dim
        wide, rank = [Segment(f"{n}_proj", self.width) for n in "qkv"], kda.head_dim
        beta = Segment("b_proj", self.heads)
        if kda.full_rank_gate:
            segments = [*wide, Segment("g_proj", self.width), Segment("f_a_proj", rank), beta]
            second = [Segment("f_b_proj", self.width)]
        else:
            segments = [*wide, Segment("f_a_proj", rank), Segment("g_a_proj", rank), beta]
            second = [Segment("f_b_proj", self.width), Segment("g_b_proj", self.width)]
        self.in_proj = MergedWeight(segments, (config.hidden_size,), pad_to=PAD_ROWS, dtype=dtype, device=device)
        self.second = MergedWeight(second, (rank,), dtype=dtype, device=device)
        taps = [Segment(f"{n}_conv1d", self.width) for n in "qkv"]
        self.conv = MergedWeight(taps, (1, kda.conv_size), dtype=torch.float32, device=device)
        self.A_log = frozen(self.heads, dtype=torch.float32, device=device)
        self.dt_bias = frozen(self.width, dtype=torch.float32, device=device)
        self.o_norm = RMSNorm(kda.head_dim, self.eps, torch.float32, device)
        self.o_proj = Linear(self.width, config.hidden_size, dtype, device)
        path = kda_paths(kda.full_rank_gate)[plan.kda.path]
        self.prologue = Prologue("kda", KdaWeights(self.in_proj, self.second), lambda rows: path)

    def forward(self, x: torch.Tensor, batch: Batch, cache: KdaState) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden], complete over the attention-TP group."""
        inputs = self.prologue(x)
        qkv = conv(inputs.qkv, batch.lengths, batch.slots, cache.conv, self.conv.buffer.squeeze(1))
        heads = (self.heads, self.config.head_dim)
        q, k, v = (part.unflatten(-1, heads) for part in qkv.split(self.width, -1))
        g = log_decay(inputs.forget.unflatten(-1, heads), self.dt_bias, self.A_log, self.config.gate_lower_bound)
        o = self._delta_rule(l2_norm(q), l2_norm(k), v, g, torch.sigmoid(inputs.beta.float()), batch, cache.state)
        y = gated_rms_norm(o, inputs.gate, self.o_norm.weight, self.eps)
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
            parts.append(kda_decode(q[:n], k[:n], v[:n], g[:n], beta[:n], batch.slots[:n], state))
        if n < len(batch.lengths):
            lengths, slots = batch.lengths[n:], batch.slots[n:]
            parts.append(kda_prefill(q[n:], k[n:], v[n:], g[n:], beta[n:], lengths, slots, state))
        return torch.cat(parts)

"""The Kimi Delta Attention layer, from normed input to this replica's summed output."""

import torch

from anabranch.fusion.buffer import MergedOwner, MergedWeight, Segment
from anabranch.fusion.kda_paths import kda_paths
from anabranch.fusion.prologue import KdaInputs, KdaWeights, Prologue
from anabranch.layers.batch import Batch, KdaState, Saves, joined
from anabranch.layers.build import Build
from anabranch.layers.linear import Linear, RMSNorm, frozen, input_weight, share
from anabranch.ops.arithmetic import sigmoid
from anabranch.ops.segments import Segments


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
        merged = input_weight(self, segments, build)
        self.second = MergedWeight(second, (rank,), dtype=dtype, device=device)
        taps = [Segment(f"{n}_conv1d", self.width) for n in "qkv"]
        self.conv = MergedWeight(taps, (1, kda.conv_size), dtype=torch.float32, device=device)
        self.A_log = frozen(self.heads, dtype=torch.float32, device=device)
        self.dt_bias = frozen(self.width, dtype=torch.float32, device=device)
        self.o_norm = RMSNorm(build, kda.head_dim, dtype=torch.float32)
        self.o_proj = Linear(build, self.width, hidden, "o_proj")
        paths, weights = (
            kda_paths(kda.full_rank_gate),
            KdaWeights(merged, self.second, build.ops, build.branch, torch.zeros(2, dtype=torch.int32, device=device)),
        )
        self.prologue = Prologue("kda", weights, lambda rows, moment: paths[build.plan.kda.pick(rows, moment)])

    def forward(self, x: torch.Tensor, batch: Batch, cache: KdaState) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden], complete over the attention-TP group."""
        inputs, n = self.prologue(x, batch.moment), batch.decodes
        if self.ops.kda_step is None or n == 0:
            # without decodes all segments are prompts, a last one of padding included
            prompts = batch.prefill if n else batch.segments
            y = self._chain(inputs, batch.segments, prompts, batch.slots, cache, batch.saves)
        else:
            y = self._step(inputs.rows(0, n), batch.slots[:n], cache)
            if batch.prefill:
                segments = batch.prefill
                parts = (y, self._chain(inputs.rows(n), segments, segments, batch.slots[n:], cache, batch.saves))
                y = torch.cat(parts)
        return self.comm.all_reduce(self.o_proj(y), "attn_tp")

    def _step(self, inputs: KdaInputs, slots: torch.Tensor, cache: KdaState) -> torch.Tensor:
        """One token of each slot in one operation: [B, P]."""
        assert self.ops.kda_step is not None
        forget, f_b = inputs.decay()
        return self.ops.kda_step(
            *(inputs.qkv, cache.conv, self.conv.buffer.squeeze(1), forget, inputs.beta, inputs.gate),
            *(self.dt_bias, self.A_log, self.config.gate_lower_bound, self.o_norm.weight, self.eps),
            *(slots, cache.state),
            # the first norm of the pass was launched plainly, hence behind whatever wrote slots, pools and weights
            early=True,
            f_b=f_b,
        )

    def _chain(
        self,
        inputs: KdaInputs,
        segments: Segments,
        prompts: Segments,
        slots: torch.Tensor,
        cache: KdaState,
        saves: Saves | None,
    ) -> torch.Tensor:
        """Conv, norms, gate, delta rule and gated norm: [T, P]. What precedes `prompts` takes the token form."""
        n, inputs = len(segments) - len(prompts), inputs.finished(self.prologue.weights)
        ops, heads = self.ops, (self.heads, self.config.head_dim)
        if saves is not None:
            assert ops.conv_save is not None
            ops.conv_save(inputs.qkv[n:], saves.slots, saves.ends, cache.conv)
        if ops.kda_prompt is not None and not n:
            return self._prompts(inputs, prompts, slots, cache, saves)
        convolve = (inputs.qkv, segments, slots, cache.conv, self.conv.buffer.squeeze(1))
        if ops.kda_inputs is None:
            q, k, v = (part.unflatten(-1, heads) for part in ops.conv(*convolve).split(self.width, -1))
            q, k, beta = ops.l2_norm(q), ops.l2_norm(k), sigmoid(inputs.beta.float())
        else:  # the token form keeps q and k in fp32
            q, k, v, beta = ops.kda_inputs(*convolve, inputs.beta, "normed" if n else ops.prefill_layout)
        forget, bound = inputs.forget.unflatten(-1, heads), self.config.gate_lower_bound
        tokens = (q, k, v, ops.log_decay(forget, self.dt_bias, self.A_log, bound), beta)
        parts = []
        if n:
            parts.append(ops.kda_decode(*(t[:n] for t in tokens), slots[:n], cache.state))
        if prompts:
            kept = {} if saves is None else {"saves": saves.chunks}
            parts.append(ops.kda_prefill(*(t[n:] for t in tokens), prompts, slots[n:], cache.state, **kept))
        return ops.gated_rms_norm(joined(parts), inputs.gate, self.o_norm.weight, self.eps)

    def _prompts(
        self, inputs: KdaInputs, prompts: Segments, slots: torch.Tensor, cache: KdaState, saves: Saves | None
    ) -> torch.Tensor:
        """`_chain` of prompts alone, by a kernel that norms and gates for itself: [T, P]."""
        ops, heads = self.ops, (self.heads, self.config.head_dim)
        assert ops.kda_prompt is not None
        convolve = (inputs.qkv, prompts, slots, cache.conv, self.conv.buffer.squeeze(1))
        if ops.kda_inputs is None:
            rows = [part.unflatten(-1, heads) for part in ops.conv(*convolve).split(self.width, -1)]
        else:
            *rows, _ = ops.kda_inputs(*convolve, inputs.beta, "grouped")
        weights, kept = (self.dt_bias, self.A_log, self.config.gate_lower_bound), saves and saves.chunks
        forget = inputs.forget.unflatten(-1, heads)
        o = ops.kda_prompt(*rows, forget, inputs.beta, *weights, kept, prompts, slots, cache.state)
        return ops.gated_rms_norm(o, inputs.gate, self.o_norm.weight, self.eps)

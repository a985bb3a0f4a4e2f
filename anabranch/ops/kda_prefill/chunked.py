"""The chunk form in two launches of our own: `prepare` over all chunks at once, then `chain` along each segment.

Chunks of 64 tokens start at a segment's first token. What `prepare` hands over for head h of chunk n, at place n H + h:
tiles  bf16  Kd = k exp(G), Qd = q exp(G) / sqrt(D), Kg = k exp(G_last - G): [64, D] each; T = (I + A)^-1, R: [64, 64]
scales fp32  dec = exp(G_last) [D], beta [64]
with G, A and R as in reference.py, but beta multiplied onto X = V - Kd S^T, which keeps the diagonal of T exactly 1.
A token's bits depend on its segment from its first token on and on nothing else in the batch. Where a segment is cut at
a multiple of 64 tokens and the state is fp32, the bits are those of the whole.
"""

# pyright: reportCallIssue=false
from dataclasses import dataclass
from functools import cache

import torch

from anabranch.ops.kda_decode.triton import aligned_rows
from anabranch.ops.kda_prefill.spec import CHUNK
from anabranch.ops.kda_prefill.triton_chain import chain
from anabranch.ops.kda_prefill.triton_prepare import prepare
from anabranch.ops.segments import Segments

GIVEN, SOFTPLUS, BOUNDED = 0, 1, 2  # kinds of gate, as in triton_prepare


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """How both kernels are launched; `rows` (64 or 128) are the value rows of one program of the chain."""

    prepare_warps: int = 4
    rows: int = 64
    chain_warps: int = 4
    stages: int = 2


CONFIG = Config()


def kda_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    segments: Segments,
    slots: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """See spec.py; D is 128. q and k are rounded to bf16 here, as every product takes bf16 operands."""
    return Prefill(v, segments, slots, state).run(q, k, g, beta)


def kda_prompt(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    forget: torch.Tensor,
    beta_logits: torch.Tensor,
    dt_bias: torch.Tensor,
    a_log: torch.Tensor,
    lower_bound: float | None,
    saves: torch.Tensor | None,
    segments: Segments,
    slots: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """See KDA_PROMPT in spec.py; D is 128."""
    gate = (SOFTPLUS, 0.0) if lower_bound is None else (BOUNDED, lower_bound)
    return Prefill(v, segments, slots, state, saves).run(q, k, forget, beta_logits, dt_bias, a_log, *gate)


class Prefill:
    """One prefill: its scratch memory and its two launches."""

    def __init__(
        self,
        v: torch.Tensor,
        segments: Segments,
        slots: torch.Tensor,
        state: torch.Tensor,
        saves: torch.Tensor | None = None,
        config: Config = CONFIG,
    ) -> None:
        self.v, self.segments, self.slots, self.state = aligned_rows(v), segments, slots, state
        self.saves, self.config = saves, config
        _, self.heads, self.dim = v.shape
        self.chunks = sum(-(-length // CHUNK) for length in segments.lengths)
        places, tile = self.chunks * self.heads, 3 * CHUNK * self.dim + 2 * CHUNK * CHUNK
        self.tiles = torch.empty(places, tile, dtype=torch.bfloat16, device=v.device)
        self.scales = torch.empty(places, self.dim + CHUNK, dtype=torch.float32, device=v.device)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        f: torch.Tensor,
        b: torch.Tensor,
        dt_bias: torch.Tensor | None = None,
        a_log: torch.Tensor | None = None,
        gate: int = GIVEN,
        bound: float = 0.0,
    ) -> torch.Tensor:
        """Both launches: o. With a given gate, f is the log decay, b is beta, and q and k have unit length."""
        self.prepare(q, k, f, b, f if dt_bias is None else dt_bias, f if a_log is None else a_log, gate, bound)
        return self.chain()

    def prepare(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        f: torch.Tensor,
        b: torch.Tensor,
        dt_bias: torch.Tensor,
        a_log: torch.Tensor,
        gate: int,
        bound: float,
    ) -> None:
        """Fill tiles and scales."""
        q, k, f = (aligned_rows(t) for t in (q, k, f))
        b = b if b[:1].is_contiguous() else b.contiguous()
        if self.chunks:
            prepare[(self.heads, self.chunks)](
                *(q, k, f, b, dt_bias, a_log, _sums(q.device), self.segments.offsets, self.tiles, self.scales),
                *(len(self.segments), q.stride(0), k.stride(0), f.stride(0), b.stride(0), bound),
                H=self.heads,
                D=self.dim,
                GATE=gate,
                NORM=gate != GIVEN,
                num_warps=self.config.prepare_warps,
            )

    def chain(self) -> torch.Tensor:
        """Walk the prepared chunks: o."""
        o = torch.empty(self.v.shape, dtype=self.v.dtype, device=self.v.device)
        saves = self.slots if self.saves is None else self.saves
        chain[(self.dim // self.config.rows, self.heads, len(self.segments))](
            *(self.tiles, self.scales, self.v, o, self.segments.offsets, self.slots, saves, self.state),
            *(len(self.segments), self.v.stride(0), self.slots.stride(0), saves.stride(0), self.state.stride(0)),
            H=self.heads,
            D=self.dim,
            ROWS=self.config.rows,
            SAVE=self.saves is not None,
            STAGES=self.config.stages,
            num_warps=self.config.chain_warps,
        )
        return o


@cache
def _sums(device: torch.device) -> torch.Tensor:
    """fp16 [8, 64, 64] of 0 and 1, times gates [64, D]: sums of the gates between token i and the last token of the
    left half of its block of 2, 4, .. 64; of those from the chunk's start through i; of those behind i."""
    i = torch.arange(CHUNK, device=device)
    row, column = i[:, None], i[None, :]
    halves = [
        (row // z == column // z) & torch.where((row & z) != 0, column <= row, column > row)
        for z in (1, 2, 4, 8, 16, 32)
    ]
    return torch.stack([*halves, column <= row, column > row]).half()

"""The chunk form in two launches of our own: `prepare` over all chunks at once, then `chain` along each segment.

Chunks of 64 tokens start at a segment's first token. What `prepare` hands over for head h of chunk n, at place n H + h:
tiles  bf16  Kd = k exp(G), Qd = q exp(G) / sqrt(D), Kg = k exp(G_last - G): [64, D] each; T = (I + A)^-1, R: [64, 64]
scales fp32  dec = exp(G_last) [D], beta [64]
with G, A and R as in reference.py, but beta multiplied onto X = V - Kd S^T, which keeps the diagonal of T exactly 1.
A token's bits depend on its segment from its first token on and on nothing else in the batch. Where a segment is cut at
a multiple of 64 tokens and the state is fp32, the bits are those of the whole. H is the number of heads of a turn.
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


HALVES, WHOLE = Config(), Config(rows=128, chain_warps=8)
SM_PAIRS = 66  # of an H200: more chains than this fill it with whole heads
# bytes beyond which heads are worked on in turn, as long as each turn still fills the device; and bytes never minded
SCRATCH, SPARE = 2 << 30, 256 << 20


def kda_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    segments: Segments,
    slots: torch.Tensor,
    state: torch.Tensor,
    saves: torch.Tensor | None = None,
) -> torch.Tensor:
    """See spec.py; D is 128. q and k are rounded to bf16 here, as every product takes bf16 operands."""
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    for part in turns(v.shape[1], v.shape[2], segments):
        call = Prefill(v[:, part], o[:, part], segments, slots, state[:, part], saves)
        call.run(q[:, part], k[:, part], g[:, part], beta[:, part])
    return o


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
    rows, weights = (q, k, v, forget, beta_logits), (dt_bias, a_log, lower_bound)
    return prompt(Prefill, *rows, *weights, saves, segments, slots, state)


def prompt(
    kernels: type["Prefill"],
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
    config: Config | None = None,
) -> torch.Tensor:
    """`kda_prompt` by the launches of `kernels`."""
    gate = (SOFTPLUS, 0.0) if lower_bound is None else (BOUNDED, lower_bound)
    dt_bias, o = dt_bias.view(v.shape[1:]), torch.empty(v.shape, dtype=v.dtype, device=v.device)
    for part in turns(v.shape[1], v.shape[2], segments):
        call = kernels(v[:, part], o[:, part], segments, slots, state[:, part], saves, config)
        rows = (t[:, part] for t in (q, k, forget, beta_logits))
        call.run(*rows, dt_bias[part], a_log[part], *gate)
    return o


def turns(heads: int, dim: int, segments: Segments) -> list[slice]:
    """Heads worked on together, a turn after the other, so that scratch memory stays within SCRATCH.

    Short segments fill their chunks badly; they get little more than one segment of as many tokens, which is what the
    engine measures when it starts.
    """
    place, chunks = sum(_place_bytes(dim)), max(1, chunks_of(segments))
    even = heads * -(-sum(segments.lengths) // CHUNK) * place
    limit = min(SCRATCH, max(SPARE, even * 9 // 8))
    most = max(limit // (chunks * place), -(-SM_PAIRS // max(1, len(segments))))
    count = -(-heads // most)
    return [slice(heads * i // count, heads * (i + 1) // count) for i in range(count)]


def chunks_of(segments: Segments) -> int:
    """Chunks of all segments."""
    return sum(-(-length // CHUNK) for length in segments.lengths)


def _place_bytes(dim: int) -> tuple[int, int]:
    """Bytes of the tiles and of the scales of a chunk and head."""
    return 2 * (3 * CHUNK * dim + 2 * CHUNK * CHUNK), 4 * (dim + CHUNK)


class Prefill:
    """One prefill: its scratch memory and its two launches. It has no turns."""

    def __init__(
        self,
        v: torch.Tensor,
        o: torch.Tensor,
        segments: Segments,
        slots: torch.Tensor,
        state: torch.Tensor,
        saves: torch.Tensor | None = None,
        config: Config | None = None,
    ) -> None:
        self.v, self.o, self.segments, self.slots, self.state = aligned_rows(v), o, segments, slots, state
        _, self.heads, self.dim = v.shape
        self.saves, self.config = saves, config or self.choose(len(segments) * self.heads)
        self.chunks = chunks_of(segments)
        tile, scale = _place_bytes(self.dim)
        places = (self.chunks, self.heads)
        self.tiles = torch.empty(*places, tile // 2, dtype=torch.bfloat16, device=v.device)
        self.scales = torch.empty(*places, scale // 4, dtype=torch.float32, device=v.device)

    @staticmethod
    def choose(chains: int) -> Config:
        """The fastest launch measured on an H200 for segments x heads; every one gives the same bits."""
        return WHOLE if chains > SM_PAIRS else HALVES

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
    ) -> None:
        """Both launches. With a given gate, f is the log decay, b is beta, and q and k have unit length."""
        self.prepare(q, k, f, b, f if dt_bias is None else dt_bias, f if a_log is None else a_log, gate, bound)
        self.chain()

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
                D=self.dim,
                GATE=gate,
                NORM=gate != GIVEN,
                num_warps=self.config.prepare_warps,
            )

    def chain(self) -> None:
        """Walk the prepared chunks: o and states."""
        saves, rows = self.slots if self.saves is None else self.saves, min(self.config.rows, self.dim)
        chain[(self.dim // rows, self.heads, len(self.segments))](
            *(self.tiles, self.scales, self.v, self.o, self.segments.offsets, self.slots, saves, self.state),
            *(len(self.segments), self.v.stride(0), self.o.stride(0)),
            *(self.slots.stride(0), saves.stride(0), self.state.stride(0)),
            D=self.dim,
            ROWS=rows,
            SAVE=self.saves is not None,
            STAGES=self.config.stages,
            num_warps=self.config.chain_warps,
        )


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

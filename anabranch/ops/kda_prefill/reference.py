"""The chunk form in plain PyTorch. See spec.py for shapes; state is V-first: S[value, key].

Inside a chunk, with G the inclusive cumulative log decay and E_ij = exp(G_i - G_j) (never above 1 for j <= i):
A_ij = beta_i <k_i, k_j E_ij> (j < i), R_ij = <q_i, k_j E_ij> / sqrt(D) (j <= i), T = (I + A)^-1 diag(beta),
u = T (V - (K exp G) S^T), O = (Q exp G) S^T / sqrt(D) + R u, S <- S exp(G_last) + u^T (K exp(G_last - G)).
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from anabranch.ops.arithmetic import sigmoid
from anabranch.ops.kda_gate.reference import log_decay
from anabranch.ops.kda_prefill import spec
from anabranch.ops.norm.reference import l2_norm
from anabranch.ops.segments import Segments

CHUNK = 16  # pairwise exponents cost chunk * D values a token; any chunk length gives the same map
BLOCK = 64  # chunks worked on at once, which bounds the memory of a long prompt


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
    """Outputs of every token; each slot's state continues from the pool and is written back.

    Computed in q's dtype, so that rows in fp64 give the exact map that others are measured against. A segment is cut
    where a state is saved, so that this is the state of a prompt which ends there, to the bit.
    """
    o, end, targets = torch.zeros_like(v), 0, iter([] if saves is None else saves.tolist())
    for length, slot in zip(segments.lengths, slots.tolist(), strict=True):
        first, end = end, end + length
        for stop, target in [*_cuts(first, end, targets), (end, -1)]:
            part, first = slice(first, stop), stop
            if slot >= 0 and part.start < stop:
                out, final = _segment(q[part], k[part], v[part], g[part], beta[part], state[slot].to(q.dtype))
                o[part] = out.to(v.dtype)
                state[slot] = final.to(state.dtype)
            if slot >= 0 and target >= 0:
                state[target] = state[slot]
    return o


def _cuts(first: int, end: int, targets: Iterator[int]) -> list[tuple[int, int]]:
    """(chunk end, slot) for each chunk of a segment whose state is saved; `targets` is read on by its chunks."""
    ends = [min(start + spec.CHUNK, end) for start in range(first, end, spec.CHUNK)]
    return [(stop, target) for stop, target in zip(ends, targets, strict=False) if target >= 0]


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
    """Norms, gate and strength, then the same."""
    g, beta = log_decay(forget, dt_bias, a_log, lower_bound), sigmoid(beta_logits.float())
    return kda_prefill(l2_norm(q), l2_norm(k), v, g, beta, segments, slots, state, saves)


def _segment(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, S: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = q.shape[0]
    outputs = []
    for first in range(0, tokens, CHUNK * BLOCK):
        part = slice(first, first + CHUNK * BLOCK)
        o, S = _block(q[part], k[part], v[part].to(q.dtype), g[part], beta[part], S)
        outputs.append(o)
    return torch.cat(outputs)[:tokens], S


def _block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, S: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, _, dim = q.shape
    q, k, v, g, beta = (_chunked(t) for t in (q * dim**-0.5, k, v, g, beta.unsqueeze(-1)))  # [N, H, CHUNK, *]
    G = g.cumsum(-2)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    E = torch.where(causal[..., None], G.unsqueeze(-2) - G.unsqueeze(-3), -torch.inf).exp()
    A = torch.einsum("nhid,nhjd,nhijd->nhij", k, k, E).tril(-1) * beta
    R = torch.einsum("nhid,nhjd,nhijd->nhij", q, k, E)
    # the diagonal of ones is implied: forward substitution, never an expansion of the inverse
    T = torch.linalg.solve_triangular(A, torch.diag_embed(beta.squeeze(-1)), upper=False, unitriangular=True)
    u_own, w = T @ v, T @ (k * G.exp())
    q_in, last = q * G.exp(), G[:, :, -1:]
    k_out, keep = k * (last - G).exp(), last.exp()
    outputs = []
    for n in range(q.shape[0]):  # only the state is sequential
        u = u_own[n] - w[n] @ S.mT
        outputs.append(q_in[n] @ S.mT + R[n] @ u)
        S = S * keep[n] + u.mT @ k_out[n]
    o = torch.stack(outputs).transpose(1, 2).flatten(0, 1)
    return o[:tokens], S


def _chunked(x: torch.Tensor) -> torch.Tensor:
    """[T, H, *] -> [N, H, CHUNK, *], padded with zeros: k = 0, beta = 0, g = 0 leave the state unchanged."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[0] % CHUNK))
    return x.unflatten(0, (-1, CHUNK)).transpose(1, 2)

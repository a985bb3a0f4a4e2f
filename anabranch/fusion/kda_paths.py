"""The projection paths of a KDA layer: each a named function over one merged buffer.

`separate` keeps the checkpoint's GEMMs (q, k and v are one), `split` puts those of a width together, `whole` all that
read x; `overlap` runs the narrow ones on a side stream (fork.py), `fused` everything in one launch, `deferred` leaves
f_b to the decode step, `single` merges nothing. Weight rows, full-rank gate: [q | k | v | g | f_a | b | pad]; low-rank
gate: [q | k | v | f_a | g_a | b | pad]. Rows in block-FP8 have a buffer of their own (docs/fusions.md).
"""

from collections.abc import Mapping

import torch

from anabranch.fusion import counters
from anabranch.fusion.prologue import KdaInputs, KdaWeights, Path
from anabranch.ops.skinny_gemm.spec import PROLOGUE_TOKENS


def _full_separate(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    qkv = w.gemm(x, w.merged.factor("q_proj", "v_proj"))
    beta = w.gemm(x, w.merged.factor("b_proj"))
    rank = w.gemm(x, w.merged.factor("f_a_proj"))
    forget = w.gemm(rank, w.second.factor("f_b_proj"))
    gate = w.gemm(x, w.merged.factor("g_proj"))
    return KdaInputs(qkv, forget, beta, gate)


def _full_split(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    qkvg = w.gemm(x, w.merged.factor("q_proj", "g_proj"))
    bfa = w.gemm(x, w.merged.factor("f_a_proj", "pad"))
    qkv, gate = qkvg.split([w.merged.size("q_proj", "v_proj"), w.merged.size("g_proj")], -1)
    return _full_tail(w, qkv, gate, bfa)


def _full_whole(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    out = w.gemm(x, w.merged.factor("q_proj", "pad"))
    sizes = [w.merged.size("q_proj", "v_proj"), w.merged.size("g_proj"), w.merged.size("f_a_proj", "pad")]
    qkv, gate, bfa = out.split(sizes, -1)
    return _full_tail(w, qkv, gate, bfa)


def _full_fused(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    """One launch; more tokens than it was made for take two."""
    if x.shape[0] > PROLOGUE_TOKENS:
        return _full_whole(w, x)
    out, (forget,) = w.both(x, 1)
    qkv, gate, _, beta = _full_columns(w, out)
    return KdaInputs(qkv, forget, beta, gate)


def _full_deferred(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    """The GEMM of `whole`; f_b, which the rules keep plain and without adapter, goes along with its input."""
    qkv, gate, rank, beta = _full_columns(w, w.gemm(x, w.merged.factor("q_proj", "pad")))
    return KdaInputs(qkv, rank, beta, gate, w.second.rows("f_b_proj"))


def _full_columns(w: KdaWeights, out: torch.Tensor) -> list[torch.Tensor]:
    """qkv, gate, f_a and beta from the columns of all rows that read x."""
    sizes = [w.merged.size("q_proj", "v_proj"), *(w.merged.size(f"{n}_proj") for n in ("g", "f_a", "b"))]
    return list(out.split([*sizes, w.merged.size("pad")], -1)[:-1])


def _full_overlap(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    qkvg, (forget, beta) = w.branch.beside(
        "kda.bfa",
        x,
        main=lambda: w.gemm(x, w.merged.factor("q_proj", "g_proj")),
        side=lambda: _forget(w, w.gemm(x, w.merged.factor("f_a_proj", "pad"))),
    )
    qkv, gate = qkvg.split([w.merged.size("q_proj", "v_proj"), w.merged.size("g_proj")], -1)
    return KdaInputs(qkv, forget, beta, gate)


def _full_tail(w: KdaWeights, qkv: torch.Tensor, gate: torch.Tensor, bfa: torch.Tensor) -> KdaInputs:
    forget, beta = _forget(w, bfa)
    return KdaInputs(qkv, forget, beta, gate)


def _forget(w: KdaWeights, bfa: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """forget [T, P] and beta [T, H] from the columns [f_a | b | pad]."""
    rank, beta, _ = bfa.split([w.merged.size(name) for name in ("f_a_proj", "b_proj", "pad")], -1)
    return w.gemm(rank, w.second.factor("f_b_proj")), beta


def _low_separate(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    qkv = w.gemm(x, w.merged.factor("q_proj", "v_proj"))
    beta = w.gemm(x, w.merged.factor("b_proj"))
    forget = w.gemm(w.gemm(x, w.merged.factor("f_a_proj")), w.second.factor("f_b_proj"))
    gate = w.gemm(w.gemm(x, w.merged.factor("g_a_proj")), w.second.factor("g_b_proj"))
    return KdaInputs(qkv, forget, beta, gate)


def _low_split(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    qkv = w.gemm(x, w.merged.factor("q_proj", "v_proj"))
    return KdaInputs(qkv, *_low_tail(w, w.gemm(x, w.merged.factor("f_a_proj", "pad"))))


def _low_whole(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    out = w.gemm(x, w.merged.factor("q_proj", "pad"))
    qkv, tail = out.split([w.merged.size("q_proj", "v_proj"), w.merged.size("f_a_proj", "pad")], -1)
    return KdaInputs(qkv, *_low_tail(w, tail))


def _low_fused(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    """One launch; more tokens than it was made for take two."""
    if x.shape[0] > PROLOGUE_TOKENS:
        return _low_whole(w, x)
    out, (forget, gate) = w.both(x, 2)
    sizes = [w.merged.size("q_proj", "v_proj"), w.merged.size("f_a_proj", "g_a_proj")]
    qkv, _, beta, _ = out.split([*sizes, *(w.merged.size(name) for name in ("b_proj", "pad"))], -1)
    return KdaInputs(qkv, forget, beta, gate)


def _low_overlap(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    qkv, tail = w.branch.beside(
        "kda.tail",
        x,
        main=lambda: w.gemm(x, w.merged.factor("q_proj", "v_proj")),
        side=lambda: _low_tail(w, w.gemm(x, w.merged.factor("f_a_proj", "pad"))),
    )
    return KdaInputs(qkv, *tail)


def _low_tail(w: KdaWeights, tail: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """forget [T, P], beta [T, H] and gate [T, P] from the columns [f_a | g_a | b | pad].

    [f_b ; g_b] is one batched GEMM over the two ranks: [2, T, rank] x [2, rank, P].
    """
    rank = w.merged.size("f_a_proj")
    beta = tail[:, 2 * rank : 2 * rank + w.merged.size("b_proj")]
    ranks = tail[:, : 2 * rank].unflatten(-1, (2, rank)).transpose(0, 1)
    counters.add("kda.gemm")
    forget, gate = w.ops.batched_linear(ranks, w.second.buffer.unflatten(0, (2, -1)))
    return forget, beta, gate


def _kda_single(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    """Nothing is merged; q, k and v are copied together afterwards."""
    qkv = torch.cat([w.gemm(x, w.merged.factor(f"{n}_proj")) for n in "qkv"], -1)
    beta = w.gemm(x, w.merged.factor("b_proj"))
    forget = w.gemm(w.gemm(x, w.merged.factor("f_a_proj")), w.second.factor("f_b_proj"))
    if any(s.name == "g_proj" for s in w.merged.segments):
        return KdaInputs(qkv, forget, beta, w.gemm(x, w.merged.factor("g_proj")))
    return KdaInputs(qkv, forget, beta, w.gemm(w.gemm(x, w.merged.factor("g_a_proj")), w.second.factor("g_b_proj")))


KDA_FULL_RANK: Mapping[str, Path[KdaWeights, KdaInputs]] = {
    "separate": Path("separate", 5, _full_separate),
    "split": Path("split", 3, _full_split),
    "whole": Path("whole", 2, _full_whole),
    "overlap": Path("overlap", 3, _full_overlap),
    "fused": Path("fused", 1, _full_fused),
    "deferred": Path("deferred", 1, _full_deferred, complete=False),
    "single": Path("single", 7, _kda_single),
}
KDA_LOW_RANK: Mapping[str, Path[KdaWeights, KdaInputs]] = {
    "separate": Path("separate", 6, _low_separate),
    "split": Path("split", 3, _low_split),
    "whole": Path("whole", 2, _low_whole),
    "overlap": Path("overlap", 3, _low_overlap),
    "fused": Path("fused", 1, _low_fused),
    "single": Path("single", 8, _kda_single),
}


def kda_paths(full_rank_gate: bool) -> Mapping[str, Path[KdaWeights, KdaInputs]]:
    """The KDA paths of a layout, by name. Behind a low-rank gate g_b needs a launch anyway: nothing is deferred."""
    return KDA_FULL_RANK if full_rank_gate else KDA_LOW_RANK

"""The projection paths of an MLA layer: each a named function over one merged buffer.

`separate` has QKV-A in one GEMM and the output gate in another, `merged` has one, `overlap` the gate on a side stream
beside QKV-A and attention (fork.py), `single` merges nothing. Weight rows: [q_a or q | kv_a | g | pad]; in block-FP8
the gate comes first (docs/fusions.md).
"""

from collections.abc import Mapping

import torch

from anabranch.fusion.fork import Fork
from anabranch.fusion.prologue import KV_A, MlaInputs, MlaWeights, Path


def _mla_separate(w: MlaWeights, x: torch.Tensor) -> MlaInputs:
    q, kv = _qkv_a(w, x)
    return MlaInputs(q, kv, _gate(w, x))


def _mla_merged(w: MlaWeights, x: torch.Tensor) -> MlaInputs:
    """The order of the rows is the buffer's: block-FP8 has the gate first, where no scale block is shared."""
    order = [s.name for s in w.merged.segments]
    out = w.gemm(x, w.merged.factor(order[0], "pad")).split([w.merged.size(name) for name in (*order, "pad")], -1)
    q, kv, gate = (out[order.index(name)] for name in (w.q, KV_A, "g_proj"))
    return MlaInputs(q, kv, Fork.ready(gate))


def _mla_single(w: MlaWeights, x: torch.Tensor) -> MlaInputs:
    """Nothing is merged."""
    return MlaInputs(w.gemm(x, w.merged.factor(w.q)), w.gemm(x, w.merged.factor(KV_A)), _gate(w, x))


def _gate(w: MlaWeights, x: torch.Tensor) -> Fork[torch.Tensor] | None:
    return Fork.ready(w.gemm(x, w.merged.factor("g_proj"))) if w.gated else None


def _mla_overlap(w: MlaWeights, x: torch.Tensor) -> MlaInputs:
    """The gate leaves here and joins where it is taken: beside QKV-A and the whole attention."""
    gate = w.branch.fork("mla.gate", x, lambda: w.gemm(x, w.merged.factor("g_proj")))
    try:
        return MlaInputs(*_qkv_a(w, x), gate)
    except BaseException:
        gate.close()
        raise


def _qkv_a(w: MlaWeights, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, kv = w.gemm(x, w.merged.factor(w.q, KV_A)).split([w.merged.size(w.q), w.merged.size(KV_A)], -1)
    return q, kv


MLA_GATED: Mapping[str, Path[MlaWeights, MlaInputs]] = {
    "separate": Path("separate", 2, _mla_separate),
    "merged": Path("merged", 1, _mla_merged),
    "overlap": Path("overlap", 2, _mla_overlap),
    "single": Path("single", 3, _mla_single),
}
MLA_PLAIN: Mapping[str, Path[MlaWeights, MlaInputs]] = {
    "separate": Path("separate", 1, _mla_separate),
    "single": Path("single", 2, _mla_single),
}


def mla_paths(output_gate: bool) -> Mapping[str, Path[MlaWeights, MlaInputs]]:
    """The MLA paths of a layout, by name. Without an output gate there is nothing to merge beyond QKV-A."""
    return MLA_GATED if output_gate else MLA_PLAIN

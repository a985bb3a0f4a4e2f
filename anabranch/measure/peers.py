"""Other teams' kernels called in their best form, for benchmarks: what no layer of ours could call as it is."""

import os

import torch

from anabranch.ops.segments import Segments


def fla_prompt(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    forget: torch.Tensor,
    beta_logits: torch.Tensor,
    dt_bias: torch.Tensor,
    a_log: torch.Tensor,
    lower_bound: float | None,
    saves: None,
    segments: Segments,
    slots: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """fla-core's chunk_kda with norms, gate and sigmoid inside, the final states copied to their slots.

    Shapes are those of KDA_PROMPT (ops/kda_prefill/spec.py). FlashKDA, to which the package would hand over where it
    is installed, is an arm of its own.
    """
    assert saves is None
    os.environ["FLA_FLASH_KDA"] = "0"
    from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]

    rows = {"q": q, "k": k, "v": v, "g": forget, "beta": beta_logits}
    o, final = chunk_kda(
        **{name: t.contiguous().unsqueeze(0) for name, t in rows.items()},
        A_log=a_log,
        dt_bias=dt_bias,
        initial_state=state[slots],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=lower_bound is not None,
        lower_bound=lower_bound,
        state_v_first=True,
        cu_seqlens=segments.offsets,
        cu_seqlens_cpu=_host_offsets(segments),
    )
    state[slots] = final
    return o[0]


_OFFSETS: dict[tuple[int, ...], torch.Tensor] = {}


def _host_offsets(segments: Segments) -> torch.Tensor:
    """One tensor for all calls of these lengths: the package keeps what it derives from the object."""
    if segments.lengths not in _OFFSETS:
        _OFFSETS[segments.lengths] = Segments.of(segments.lengths, device="cpu").offsets
    return _OFFSETS[segments.lengths]

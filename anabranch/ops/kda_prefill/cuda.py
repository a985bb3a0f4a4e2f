"""The chunk form as in chunked.py, both launches in CUDA C++ for Hopper (csrc/).

For rows as a convolution wrote them; what is normed and gated already runs the Triton kernels. The memory between the
launches is laid out the same, so either kernel may follow the other's.
"""

import torch

from anabranch.ops import native
from anabranch.ops.kda_decode.triton import aligned_rows
from anabranch.ops.kda_prefill import chunked
from anabranch.ops.kda_prefill.chunked import GIVEN, HALVES, Config, kda_prefill
from anabranch.ops.segments import Segments

__all__ = ["Prefill", "kda_prefill", "kda_prompt"]

D = 128


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
    """See KDA_PROMPT in spec.py; D is 128.

    Raises:
        ValueError: a dtype or layout that the kernels were not made for.
    """
    _check_rows({"q": q, "k": k, "v": v, "forget": forget})
    _check("beta_logits", beta_logits, tuple(v.shape[:2]), torch.bfloat16)
    _check("dt_bias", dt_bias, (v.shape[1] * D,), torch.float32)
    _check("a_log", a_log, (v.shape[1],), torch.float32)
    _check_pool(state, v.shape[1], slots, saves, segments)
    rows, weights = (q, k, v, forget, beta_logits), (dt_bias, a_log, lower_bound)
    return chunked.prompt(Prefill, *rows, *weights, saves, segments, slots, state)


class Prefill(chunked.Prefill):
    """One prefill by the native kernels, which have one form each: `config` changes nothing."""

    @staticmethod
    def choose(chains: int) -> Config:
        """That of the native chain, which owns half a head a CTA."""
        return HALVES

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
        assert gate != GIVEN
        q, k, f = (aligned_rows(t) for t in (q, k, f))
        b = b if b[:1].is_contiguous() else b.contiguous()
        if self.chunks:
            rest = (dt_bias.contiguous(), a_log.contiguous(), self.segments.offsets, self.tiles, self.scales, bound)
            native.load("kda_prefill").prepare(q, k, f, b, *rest)

    def chain(self) -> None:
        """Walk the prepared chunks: o and states."""
        if self.chunks:
            tensors = (self.tiles, self.scales, self.v, self.o, self.segments.offsets, self.slots, self.saves)
            native.load("kda_prefill").chain(*tensors, self.state)


def _refuse(name: str, has: object, needs: str) -> None:
    raise ValueError(f"kda_prompt: {name} is {has}, needs {needs}")


def _check(name: str, t: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(t.shape) != shape or t.dtype != dtype:
        _refuse(name, f"{t.dtype} {list(t.shape)}", f"{dtype} {list(shape)}")


def _check_rows(rows: dict[str, torch.Tensor]) -> None:
    tokens, heads = rows["v"].shape[:2]
    for name, t in rows.items():
        _check(name, t, (tokens, heads, D), torch.bfloat16)


def _check_pool(
    state: torch.Tensor, heads: int, slots: torch.Tensor, saves: torch.Tensor | None, segments: Segments
) -> None:
    if state.dtype not in (torch.float32, torch.bfloat16):
        _refuse("state", state.dtype, "float32 or bfloat16")
    if tuple(state.shape[1:]) != (heads, D, D) or not state[:1].is_contiguous():
        _refuse("state", f"{list(state.shape)} of strides {state.stride()}", f"dense slots of [{heads}, {D}, {D}]")
    if state.data_ptr() % 8 or state.stride(0) % 2:
        _refuse("state", f"at {state.data_ptr() % 8} bytes, pitch {state.stride(0)}", "slots on 8 bytes")
    _check("slots", slots, (len(segments),), torch.int64)
    if saves is not None:
        _check("saves", saves, (chunked.chunks_of(segments),), torch.int64)

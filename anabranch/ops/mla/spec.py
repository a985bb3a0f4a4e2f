"""Contracts of latent attention. T or B query tokens, H local heads, r latent width, R = r + rope cache row width."""

from collections.abc import Sequence

from anabranch.ops.norm.spec import RMS_NORM
from anabranch.ops.spec import Floor, OpSpec, tolerance

_SHARED = {
    "q": "model dtype [tokens, H, nope + rope]",
    "block_table": "int64 [B, max pages]; entry j holds positions j*page .. j*page + page - 1",
    "pages": "model dtype [pages, page size, R]: normed latent, then the raw shared key",
    "kv_b": "model dtype [H, nope + v, r]: key rows, then value rows",
}

_WRITE = {
    "kv": "model dtype [T, R], unit inner stride, any row stride: raw latent, then the shared key",
    "weight": "model dtype [r]: of the latent's norm, with `eps`",
    "rows": "int64 [T]: page * page size + offset of each token's cache row; negative is none",
}

MLA_WRITE = OpSpec(
    name="mla_write",
    inputs={**_WRITE, "pages": _SHARED["pages"]},
    outputs={"pages": "in place; a token without a row writes nothing, or the last page, which nobody reads"},
    constraints=("rms_norm's rounding: the normed value before the weight", "a row appears once in a batch"),
    equality=RMS_NORM.equality,
    source="model_spec section 5, P10",
)

MLA_PREFILL = OpSpec(
    name="mla_prefill",
    inputs={**_SHARED, "segments": "Segments: new tokens of each sequence and its tokens in the cache, they included"},
    outputs={"o": "model dtype [tokens, H * v]"},
    constraints=("causal by order", "scale (nope + rope)^-1/2", "softmax fp32, rounded before it meets the values"),
    equality=tolerance(2e-6, 2e-2),
    source="model_spec section 5, explicit form",
)

MLA_DECODE = OpSpec(
    name="mla_decode",
    inputs={**_SHARED, "totals": "int64 [B]: tokens of each sequence in the cache, the query's included"},
    outputs={"o": "model dtype [B, H * v]; zero where the total is 0"},
    constraints=("one query token a sequence", "rounds q and the latent mixture once more than the explicit form"),
    equality=tolerance(2e-6, 2e-2),
    source="model_spec section 5, absorbed form; DeepSeek-V2, arXiv 2405.04434",
)

MLA_STEP = OpSpec(
    name="mla_step",
    inputs={
        **_WRITE,
        **_SHARED,
        "totals": MLA_DECODE.inputs["totals"],
        "early": "bool: lengths, table and all rows but each request's newest may be read before the kernel before has "
        "ended; the caller states what ops/kda_step/spec.py says of early reads, and that this step writes no other "
        "row that a request sees: no two of its tokens are of one sequence",
        "gate": "None, or a function that gives the logits, model dtype [B, H * v], once attention is under way",
    },
    outputs={"o": "model dtype [B, H * v], gated; zero where the total is 0", "pages": "as mla_write leaves them"},
    constraints=("mla_write, mla_decode and gate, rounded where these round", "the order of sums depends on the batch"),
    equality=MLA_DECODE.equality,
    source="model_spec section 5, absorbed form",
)


def decode_floor(totals: Sequence[int], heads: int, rank: int = 512, rope: int = 64, value: int = 128) -> Floor:
    """Cache rows and, once each, weights, queries, new rows and outputs."""
    rows, tokens = sum(totals), len(totals)
    moved = rows * (rank + rope) + heads * 2 * value * rank + tokens * ((rank + rope) + heads * (3 * value + rope))
    return Floor(bytes=2 * moved, flops=2 * rows * heads * (2 * rank + rope))

"""Contracts of latent attention. T or B query tokens, H local heads, r latent width, R = r + rope cache row width."""

from anabranch.ops.spec import OpSpec, tolerance

_SHARED = {
    "q": "model dtype [tokens, H, nope + rope]",
    "block_table": "int64 [B, max pages]; entry j holds positions j*page .. j*page + page - 1",
    "pages": "model dtype [pages, page size, R]: normed latent, then the raw shared key",
    "kv_b": "model dtype [H, nope + v, r]: key rows, then value rows",
}

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

"""Contract of the fused decode step. B requests of T tokens, H local heads, D channels, P = H * D.

Early reads. A kernel may start while the kernel before it still runs (programmatic dependent launch) and read what
that one does not write. `early` allows it to read slots, keep, both pools and the weights. The caller states that since
the last write to any of them a kernel was launched plainly, that is, behind everything before it: in a model the first
norm of the pass. Without `early` nothing is read before the kernel before has ended.
"""

from anabranch.ops.spec import Floor, OpSpec, tolerance

F_B_INSIDE = ("cuda", "reference")  # the implementations that take `f_b`

KDA_STEP = OpSpec(
    name="kda_step",
    inputs={
        "qkv": "model dtype [B*T, 3P] raw projection rows, request-major, any row stride",
        "conv_pool": "model dtype [slots, 3, 3P]; updated in place",
        "conv_weight": "fp32 [3P, 4]",
        "forget, gate": "model dtype [B*T, P], any row stride",
        "beta_logits": "model dtype [B*T, H], any row stride",
        "dt_bias, a_log, norm_weight": "fp32 [P], [H], [D]",
        "slots": "int64 [B] where each request's state is read; -1 is no slot: pools untouched, output zero",
        "state": "fp32 or bf16 [slots, H, D, D], V-first; updated in place",
        "keep": "int64 [B, T]: the slot that takes window and state after each token, -1 none; None: slots, at the end",
        "f_b": "model dtype [P, D] or None; with it `forget` is f_a's output [B*T, D], and f_b is applied inside",
        "early": "bool, see above",
    },
    outputs={"y": "model dtype [B*T, P], normed and gated"},
    constraints=(
        "rounds where the chain of separate operations rounds; T tokens are as T steps, bit for bit",
        "a slot that is written appears once, and no other request reads it",
        "a non-finite request changes no bit of another",
    ),
    equality=tolerance(2e-6, 1.6e-2),
    source="model_spec sections 4.2 to 4.9",
)


def floor(requests: int, heads: int, tokens: int = 1, state_itemsize: int = 4, dim: int = 128) -> Floor:
    """State and window of each request in and out once; conv weights once; q, k, v, forget, gate in and y out."""
    width = heads * dim
    per_request = 2 * width * dim * state_itemsize + 2 * 9 * width * 2 + tokens * (6 * width + heads) * 2
    return Floor(bytes=requests * per_request + 3 * width * 16, flops=7 * requests * tokens * width * dim)

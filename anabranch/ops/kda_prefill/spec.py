"""Contract of the prefill form. T packed tokens of B segments, H local heads, D channels."""

from anabranch.ops.spec import Floor, OpSpec, tolerance

CHUNK = 64  # tokens of the kernels' chunks, and of a page of the prefix cache

KDA_PREFILL = OpSpec(
    name="kda_prefill",
    inputs={
        "q, k": "fp32 [T, H, D], unit length per head",
        "v": "model dtype [T, H, D]",
        "g": "fp32 [T, H, D] log decay, <= 0",
        "beta": "fp32 [T, H] in (0, 1)",
        "segments": "Segments: B segments that make up the T tokens",
        "slots": "int64 [B]; -1 is no slot: state neither read nor written, output zero",
        "state": "fp32 or bf16 [slots, H, D(value), D(key)], V-first; initial state in, final state out",
        "saves": "as in KDA_PROMPT; implementations that save no states do not take it",
    },
    outputs={"o": "model dtype of v [T, H, D]"},
    constraints=("no exponent above 0 is ever formed", "chunks never cross a segment boundary"),
    equality=tolerance(3e-6, 1.5e-2),
    source="model_spec section 4.7; arXiv 2510.26692",
)

# where the chosen implementation of kda_prefill has one: the same from what a convolution and the projections wrote
KDA_PROMPT = OpSpec(
    name="kda_prompt",
    inputs={
        "q, k, v": "model dtype [T, H, D], any row stride: convolved, q and k not normed",
        "forget": "model dtype [T, H, D]: output of f_b",
        "beta_logits": "model dtype [T, H], any row stride",
        "dt_bias, a_log, lower_bound": "as in ops/kda_gate",
        "saves": "int64 [N] or None: the slot that takes the state after each of the segments' N chunks; -1 is none",
        "segments, slots, state": "as in KDA_PREFILL",
    },
    outputs={"o": "model dtype of v [T, H, D]"},
    constraints=(*KDA_PREFILL.constraints, "norms, gate and beta as l2_norm, log_decay and sigmoid compute them"),
    equality=tolerance(3e-6, 1.5e-2),
    source="model_spec sections 4.3 to 4.7",
)

# error norm over reference norm, against fp64: outputs and states, of random inputs and of near-equal keys (eps 1e-2)
RANDOM_ERRORS, EQUAL_KEY_ERRORS = (6e-3, 6e-3), (2e-2, 6e-2)


def floor(tokens: int, heads: int, segments: int = 1, dim: int = 128, itemsize: int = 2) -> Floor:
    """q, k, v, forget and beta read and o written once, states read and written once; products of the chunk form."""
    width = heads * dim
    moved = tokens * (5 * width + heads) * itemsize + 2 * segments * width * dim * 4
    return Floor(bytes=moved, flops=tokens * heads * (6 * dim * dim + 8 * CHUNK * dim))

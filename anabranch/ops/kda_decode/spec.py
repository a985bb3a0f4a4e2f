"""Contract of the decode step. B requests, H local heads, D channels (keys and values alike)."""

from anabranch.ops.spec import Floor, OpSpec, tolerance

KDA_DECODE = OpSpec(
    name="kda_decode",
    inputs={
        "q, k": "fp32 [B, H, D], unit length per head",
        "v": "model dtype [B, H, D]",
        "g": "fp32 [B, H, D] log decay",
        "beta": "fp32 [B, H] in (0, 1)",
        "slots": "int64 [B]; -1 is no slot: state untouched, output zero",
        "state": "fp32 or bf16 [slots, H, D(value), D(key)], V-first; updated in place",
    },
    outputs={"o": "model dtype of v [B, H, D]"},
    constraints=("decay, then predict, then write, then read", "a slot appears at most once in a batch"),
    equality=tolerance(1e-6, 8e-3),
    source="model_spec section 4.6",
)


def floor(requests: int, heads: int, dim: int = 128, state_itemsize: int = 4) -> Floor:
    """Every state read and written once; q, k, v, o in bf16 and g in bf16 are included."""
    state = 2 * requests * heads * dim * dim * state_itemsize
    return Floor(bytes=state + 5 * requests * heads * dim * 2, flops=7 * requests * heads * dim * dim)

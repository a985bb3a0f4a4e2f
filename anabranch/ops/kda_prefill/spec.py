"""Contract of the prefill form. T packed tokens of B segments, H local heads, D channels."""

from anabranch.ops.spec import OpSpec, tolerance

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
    },
    outputs={"o": "model dtype of v [T, H, D]"},
    constraints=("no exponent above 0 is ever formed", "chunks never cross a segment boundary"),
    equality=tolerance(3e-6, 1.5e-2),
    source="model_spec section 4.7; arXiv 2510.26692",
)

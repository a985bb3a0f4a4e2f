"""Contract of the short convolution. T packed tokens of B segments, C channels (q|k|v), K taps."""

from anabranch.ops.spec import OpSpec, tolerance

CONV = OpSpec(
    name="conv",
    inputs={
        "x": "model dtype [T, C], unit inner stride, any row stride: raw projection rows",
        "segments": "Segments: B segments that make up the T tokens",
        "slots": "int64 [B]; -1 is no slot: state neither read nor written, output zero",
        "pool": "model dtype [slots, K-1, C]: the last raw rows, row 0 oldest; updated in place",
        "weight": "fp32 [C, K]; tap K-1 multiplies the current token",
    },
    outputs={"y": "model dtype [T, C], dense"},
    constraints=("accumulate and SiLU in fp32, one rounding", "a slot appears at most once in a batch"),
    equality=tolerance(1e-6, 8e-3),
    source="model_spec section 4.2",
)

"""Contract of the short convolution. T packed tokens of B segments, C channels (q|k|v), K taps."""

from anabranch.ops.spec import BITWISE, OpSpec, tolerance

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

# the window that a prompt which ended there would leave, while the prompt goes on
CONV_SAVE = OpSpec(
    name="conv_save",
    inputs={
        "x": "as in CONV",
        "slots": "int64 [S], dense: the slot that takes a window; -1 is none",
        "ends": "int64 [S], dense: rows of x before and in it; at least K-1 of them belong to its segment",
        "pool": "as in CONV; updated in place",
    },
    outputs={},
    constraints=("no slot takes two windows, and none is one that the batch reads",),
    equality=BITWISE,
    source="model_spec section 4.2",
)

"""Contract of the MXFP4 decode. N rows, K columns (a multiple of 32)."""

from anabranch.ops.spec import BITWISE, OpSpec

MXFP4 = OpSpec(
    name="mxfp4_dequantize",
    inputs={
        "packed": "uint8 [..., N, K/2]; the LOW nibble of byte j is column 2j, the high one column 2j+1",
        "scale": "uint8 [..., N, K/32]; 2^(s-127), 255 is NaN",
    },
    outputs={"w": "bf16 or fp32 [..., N, K], every value exact"},
    equality=BITWISE,
    source="OCP MX v1.0; compressed-tensors format mxfp4-pack-quantized",
)

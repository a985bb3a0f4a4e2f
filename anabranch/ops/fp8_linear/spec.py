"""Contract of the product with a block-FP8 weight. T tokens, N output rows, K input columns; blocks of 128 x 128."""

from anabranch.ops.spec import Floor, OpSpec, tolerance

FP8_LINEAR = OpSpec(
    name="fp8_linear",
    inputs={
        "x": "model dtype or fp32 [T, K], unit inner stride",
        "codes": "float8_e4m3fn [N, K], contiguous",
        "scale": "fp32 [ceil(N/128), ceil(K/128)], unit inner stride; w = code times the scale of its block",
    },
    outputs={"y": "dtype of x [T, N]"},
    constraints=(
        "weight-only: activations are not quantised (W8A16)",
        "row 0 of codes starts a scale block",
        "w is not rounded to the dtype of x: dequantised in fp32, or the scale multiplies the sum over a block",
        "but an implementation that is not batch-invariant may round it once, to nearest, where x is bf16",
        "accumulated in fp32, rounded once",
        "codes and scale must not be written by the kernel launched just before: they are read before it has ended",
    ),
    equality=tolerance(3e-6, 8e-3),
    source="block-FP8 checkpoints: weight_scale_inv [out/128, in/128] or weight_scale [out/128, 1, in/128, 1]",
)


def floor(tokens: int, rows: int, columns: int, itemsize: int = 2) -> Floor:
    """Codes are one byte, scales four for each block; inputs and outputs have `itemsize` bytes a value."""
    blocks = -(-rows // 128) * -(-columns // 128)
    moved = rows * columns + 4 * blocks + tokens * (columns + rows) * itemsize
    return Floor(bytes=moved, flops=2 * tokens * rows * columns)

"""Contract of the matrix product. T tokens, N output rows, K input columns, G products together."""

from anabranch.ops.spec import Floor, OpSpec, tolerance

LINEAR = OpSpec(
    name="linear",
    inputs={"x": "model dtype or fp32 [T, K], unit inner stride", "w": "dtype of x [N, K], any row stride"},
    outputs={"y": "dtype of x [T, N]"},
    constraints=("accumulated in fp32, rounded once",),
    equality=tolerance(3e-6, 8e-3),
    source="torch.nn.functional.linear",
)

BATCHED_LINEAR = OpSpec(
    name="batched_linear",
    inputs={"x": "model dtype [G, T, K], unit inner stride", "w": "model dtype [G, N, K]"},
    outputs={"y": "model dtype [G, T, N]"},
    constraints=LINEAR.constraints,
    equality=LINEAR.equality,
    source="torch.bmm",
)


def floor(tokens: int, rows: int, columns: int, itemsize: int = 2) -> Floor:
    """Weights, inputs and outputs cross memory once."""
    moved = rows * columns + tokens * (columns + rows)
    return Floor(bytes=moved * itemsize, flops=2 * tokens * rows * columns)

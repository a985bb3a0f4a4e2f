"""The few-token products on Hopper: right, and with bits that depend on a row of x, a row of w and K alone."""

import pytest
import torch

from anabranch.ops.linear.triton import batched_linear as triton_batched
from anabranch.ops.linear.triton import linear as triton_linear
from anabranch.ops.skinny_gemm import configs
from anabranch.ops.skinny_gemm.cuda import gemm_low_rank, linear, low_rank
from anabranch.ops.skinny_gemm.spec import LOW_RANK, SKINNY_GEMM
from anabranch.ops.spec import BITWISE

MS = (1, 2, 5, 7, 8, 9, 16, 17, 24, 31, 32, 33, 48, 64, 65, 96, 127, 128)
# in-projections of both models at attention-TP 1, 8, 16, MLA, o_proj, q_b, shared expert, and the narrow ones
SHAPES = (
    (3648, 7168),
    (6144, 7168),
    (6288, 7168),
    (49376, 7168),
    (3216, 7168),
    (144, 7168),
    (8, 7168),
    (12576, 2304),
    (1808, 2304),
    (6720, 2304),
    (288, 2304),
    (2304, 4096),
    (7168, 1536),
    (2304, 1536),
    (2304, 1024),
    (2304, 512),
    (536, 256),
)


def randn(*shape, scale=1.0):
    """bf16 of a normal distribution."""
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(0, scale)


def exact(x, w):
    """The product in fp64, rows of w a few at a time."""
    return torch.cat([x.double() @ part.double().mT for part in w.split(8192)], 1)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_products_are_right_and_bits_are_the_rows_own(rows, columns):
    """M = 1 .. 128 against fp64, and every M bit-equal to the same rows of the largest."""
    torch.manual_seed(rows)
    x, w = randn(128, columns), randn(rows, columns, scale=0.02)
    whole, reference = linear(x, w), exact(x, w)
    for m in MS:
        got = linear(x[:m], w)
        SKINNY_GEMM.equality.check(got, reference[:m].to(got.dtype), f"M={m}")
        BITWISE.check(got, whole[:m], f"M={m}")
    BITWISE.check(linear(x[77:78], w), whole[77:78], "row 77 alone")
    BITWISE.check(triton_linear(x, w), whole, "Triton")


@pytest.mark.parametrize(("rows", "columns"), [(6288, 7168), (12576, 2304), (2304, 1536)])
def test_merging_changes_no_bit(rows, columns):
    """Any slice of rows multiplied alone equals the slice of the merged product; x may be strided."""
    torch.manual_seed(0)
    wide = randn(64, columns + 64)
    x, w = wide[:, :columns], randn(rows, columns, scale=0.02)
    for m in (1, 8, 16, 32, 64):
        whole = linear(x[:m], w)
        for first, last in ((0, 3072), (rows - 144, rows), (8, 16), (1024, 1024 + 560)):
            first, last = min(first, rows - 8), min(last, rows)
            BITWISE.check(linear(x[:m], w[first:last]), whole[:, first:last], f"M={m} rows {first}..{last}")


@pytest.mark.parametrize(("rows", "columns"), [(3648, 7168), (6720, 2304), (144, 7168), (2304, 4096)])
def test_every_layout_gives_the_same_bits(rows, columns):
    """All compiled variants that fit."""
    torch.manual_seed(1)
    x, w = randn(128, columns), randn(rows, columns, scale=0.02)
    whole = linear(x, w)
    seen = set()
    for m in (3, 16, 24, 32, 64, 128):
        for config in configs.candidates(m, rows, columns):
            BITWISE.check(linear(x[:m], w, config), whole[:m], f"M={m} {config}")
            seen.add((config.C, config.XR, config.T, config.WGS, config.KB))
    assert len(seen) >= 10


@pytest.mark.parametrize(
    ("heads", "hidden", "sides"),
    [(h, 7168, 1) for h in (6, 12, 24, 48, 96)] + [(h, 2304, 2) for h in (4, 8, 16, 32)],
)
def test_prologue_in_one_launch(heads, hidden, sides):
    """[q k v g | f_a b pad] and f_b, or [q k v | f_a g_a b pad] and [f_b ; g_b]: the bits of the separate products,
    three launches in a row, sync words clean."""
    torch.manual_seed(2)
    low_row0 = heads * 128 * (5 - sides)
    rows = low_row0 + -(-(128 * sides + heads) // 16) * 16
    w, w2 = randn(rows, hidden, scale=0.02), randn(sides, heads * 128, 128, scale=0.1)
    sync = torch.zeros(2, dtype=torch.int32, device="cuda")
    for m in (1, 3, 8, 16, 17, 24, 31, 32, 64):
        x = randn(m, hidden)
        whole = linear(x, w)
        ranks = whole[:, low_row0 : low_row0 + sides * 128].unflatten(-1, (sides, 128)).transpose(0, 1)
        second = low_rank(ranks, w2)
        for _ in range(3):
            y, y2 = gemm_low_rank(x, w, low_row0, w2, sync)
            BITWISE.check(y, whole, f"M={m}")
            BITWISE.check(y2, second, f"M={m}, second product")
        assert sync.tolist() == [0, 0]


@pytest.mark.parametrize("groups", [1, 2])
def test_low_rank_product(groups):
    """Against fp64, at token counts of every kind, strided inputs; bits do not depend on M."""
    torch.manual_seed(3)
    w = randn(groups, 1546, 128, scale=0.1)
    wide = randn(300, 3 * 128 + 32)
    x = wide[:, 32 : 32 + groups * 128].unflatten(-1, (groups, 128)).transpose(0, 1)
    whole = low_rank(x, w)
    LOW_RANK.equality.check(whole, torch.bmm(x.double(), w.double().mT).to(whole.dtype))
    for m in MS:
        BITWISE.check(low_rank(x[:, :m], w), whole[:, :m], f"M={m}")
    BITWISE.check(triton_batched(x, w), whole, "Triton")


@pytest.mark.parametrize("m", [1, 8, 64])
def test_replays_with_new_inputs_behind_other_kernels(m):
    """A graph of norm-like kernel, product, product: new inputs and NaN in every output before each replay."""
    torch.manual_seed(4)
    w1, w2 = randn(7168, 7168, scale=0.01), randn(6288, 7168, scale=0.02)
    x = randn(m, 7168)
    outs = []

    def chain():
        outs[:] = [linear(linear(x.mul(0.5), w1), w2)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        chain()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(5):
        x.copy_(randn(m, 7168))
        outs[0].fill_(float("nan"))
        graph.replay()
        BITWISE.check(outs[0], linear(linear(x.mul(0.5), w1), w2))


def test_wrong_inputs_are_refused():
    """One line that names the value."""
    w = randn(64, 256)
    with pytest.raises(ValueError, match="129"):
        linear(randn(129, 256), w)
    with pytest.raises(ValueError, match="no layout"):
        linear(randn(2, 128), randn(64, 128))
    config = configs.choose(2, 64, 256)
    with pytest.raises(ValueError, match="row pitch"):
        linear(randn(2, 260)[:, 1:257], w, config)

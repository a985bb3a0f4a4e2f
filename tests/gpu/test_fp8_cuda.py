"""The CUDA block-FP8 product on Hopper: right, and with bits that depend on a row of x, a row of W and K alone."""

import pytest
import torch

from anabranch.ops.fp8_linear import cuda, expanded, layout, reference, segmented, skinny
from anabranch.ops.fp8_linear.reference import BLOCK, CODES, blocks, quantize
from anabranch.ops.fp8_linear.spec import FP8_LINEAR
from anabranch.ops.fp8_linear.triton import fp8_linear as by_triton
from anabranch.ops.spec import BITWISE

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
MS = (1, 3, 8, 9, 16, 17, 32, 33, 64, 65, 100, 128)
# QKVG, MLA whole, q_b, o_proj of Kimi-K3 at TP8; QKV and o_proj of Kimi-Linear; kv_a; parts without a block; a few rows
SHAPES = (
    *((6144, 7168), (3648, 7168), (2304, 1536), (7168, 1536), (12288, 2304), (2304, 4096), (576, 7168)),
    *((304, 256), (136, 768), (16, 512)),
)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every scale differs, by up to a factor of 25 between rows."""
    spread = torch.linspace(0.2, 5, rows, device="cuda")[:, None]
    codes, scale = quantize(torch.randn(rows, columns, device="cuda") * spread / columns**0.5)
    return codes, scale * (0.5 + torch.rand_like(scale))


def exact(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x.double() @ reference.dequantize(codes, scale).double().T).bfloat16()


def poisoned(run, x: torch.Tensor, *rest) -> torch.Tensor:
    """The product where the memory that it gets for its output holds NaN."""
    junk = torch.full((x.shape[0], rest[0].shape[0]), float("nan"), dtype=x.dtype, device="cuda")
    del junk
    return run(x, *rest)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_products_are_right_and_bits_are_the_rows_own(rows, columns):
    codes, scale = weight(rows, columns)
    x = randn(128, columns + 24)[:, 8 : 8 + columns]
    whole, want = poisoned(cuda.multiply, x, codes, scale), exact(x, codes, scale)
    for m in MS:
        got = poisoned(cuda.multiply, x[:m], codes, scale)
        FP8_LINEAR.equality.check(got, want[:m], f"M={m}")
        BITWISE.check(got, whole[:m], f"M={m}")
    BITWISE.check(cuda.multiply(x[77:78], codes, scale), whole[77:78], "row 77 alone")


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_the_bits_of_triton(rows, columns):
    codes, scale = weight(rows, columns)
    x = randn(128, columns)
    for m in (1, 17, 128):
        BITWISE.check(cuda.multiply(x[:m], codes, scale), by_triton(x[:m], codes, scale), f"M={m}")


@pytest.mark.parametrize(("rows", "columns"), [(6144, 7168), (12288, 2304), (2304, 1536), (304, 256)])
def test_every_layout_gives_the_same_bits(rows, columns):
    codes, scale = weight(rows, columns)
    x = randn(128, columns)
    whole, seen = cuda.multiply(x, codes, scale), set()
    for m in (3, 8, 16, 32, 64, 128):
        for found in cuda.layouts(m, rows, columns):
            BITWISE.check(cuda.multiply(x[:m], codes, scale, found), whole[:m], f"M={m} {found}")
            seen.add(found.name)
    fitting = {v for v in layout.VARIANTS if v[3] == 1 or columns % (4 * BLOCK * v[3]) == 0}
    assert len(seen) == len(fitting)


def test_merging_changes_no_bit():
    codes, scale = weight(6144, 7168)
    for m in (1, 16, 64, 128):
        x = randn(m, 7168)
        whole = cuda.multiply(x, codes, scale)
        for first, last in ((0, 1536), (1536, 3072), (4608, 6144), (6016, 6080)):
            part = cuda.multiply(x, codes[first:last], scale[first // BLOCK :])
            BITWISE.check(part, whole[:, first:last].contiguous(), f"M={m} rows {first} to {last}")


def test_all_codes_and_nan_where_a_weight_is_nan():
    codes = torch.randint(0, 256, (256, 512), dtype=torch.uint8, device="cuda")
    codes[(codes & 0x7F) == 0x7F] = 0x7E  # no NaN yet
    codes[:, :256] = torch.arange(256, device="cuda")[None, :] % 127
    scale = torch.rand(2, 4, device="cuda") + 0.5
    x = randn(5, 512)
    FP8_LINEAR.equality.check(cuda.multiply(x, codes.view(CODES), scale), exact(x, codes.view(CODES), scale))
    codes[3, 500], codes[200, 17] = 0x7F, 0xFF
    got = cuda.multiply(x, codes.view(CODES), scale)
    rows = got.isnan().nonzero()[:, 1].unique().tolist()
    assert rows == [3, 200]
    assert got[:, rows].isnan().all()


@pytest.mark.parametrize("kind", [skinny, segmented], ids=["skinny", "segmented"])
def test_any_number_of_tokens_and_shapes_of_other_kernels(kind):
    for rows, columns in ((3648, 7168), (301, 200)):
        codes, scale = weight(rows, columns)
        x = randn(300, columns)
        want = exact(x, codes, scale)
        for m in (0, 1, 128, 129, 300):
            FP8_LINEAR.equality.check(kind.fp8_linear(x[:m], codes, scale), want[:m], f"M={m}")


def test_segmented_bits_do_not_know_the_batch():
    codes, scale = weight(3648, 7168)
    x = randn(300, 7168)
    whole = segmented.fp8_linear(x, codes, scale)
    for first, last in ((0, 1), (127, 130), (128, 300), (200, 264)):
        BITWISE.check(segmented.fp8_linear(x[first:last], codes, scale), whole[first:last], f"{first} to {last}")
    BITWISE.check(skinny.fp8_linear(x[: expanded.FROM - 1], codes, scale), whole[: expanded.FROM - 1])


@pytest.mark.parametrize("m", [1, 32, 128])
def test_graph_replay_reads_new_codes_scales_and_inputs(m):
    codes, scale = weight(3648, 7168)
    x = randn(m, 7168)
    cuda.multiply(x, codes, scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = cuda.multiply(x.mul(0.5), codes, scale)
    for _ in range(3):
        new_codes, new_scale = weight(3648, 7168)
        codes.copy_(new_codes)
        scale.copy_(new_scale * torch.rand((), device="cuda"))
        x.copy_(randn(m, 7168))
        y.fill_(float("nan"))
        graph.replay()
        BITWISE.check(y, cuda.multiply(x.mul(0.5), codes, scale))


@pytest.mark.parametrize("m", [8, 64, 128])
def test_back_to_back_launches_in_a_graph_wait_for_each_other(m):
    """Sixteen products, each of the last one's output, launched early: the bits of one at a time."""
    codes, scale = weight(2048, 2048)
    x = randn(m, 2048)

    def chain(wait: bool) -> torch.Tensor:
        y = x
        for _ in range(16):
            y = cuda.multiply(y, codes, scale)
            if wait:
                torch.cuda.synchronize()
        return y

    want = chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(False)
    for _ in range(50):
        y.fill_(float("nan"))
        graph.replay()
        BITWISE.check(y, want)


def test_what_the_kernel_cannot_take_is_named():
    codes, scale = weight(256, 512)
    with pytest.raises(ValueError, match="129"):
        cuda.multiply(randn(129, 512), codes, scale)
    found = layout.choose(8, 256, 512)
    assert found is not None
    for bad, what in ((scale[:, :3], "columns of scale"), (scale[:1], "rows of scale")):
        with pytest.raises(ValueError, match=what):
            cuda.multiply(randn(8, 512), codes, bad, found)
    assert scale.shape == (blocks(256), blocks(512))

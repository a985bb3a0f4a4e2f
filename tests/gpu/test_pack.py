"""Packing on a real GPU: the target shape, wide addresses, graph replay. Checks: section 7 of the functional spec."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from anabranch.ops.pack.spec import PACK, counts
from anabranch.ops.pack.triton import pack


def projections(tokens: int, heads: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """q, k, v and beta as slices of a convolution's rows and of a merged projection."""
    width = heads * 128
    mixed = torch.randn(1, tokens, 3 * width, device="cuda").to(dtype)
    beta = torch.randn(1, tokens, 128 + heads + -heads % 16, device="cuda").to(dtype)[..., 128 : 128 + heads]
    return [*(part.unflatten(-1, (heads, 128)) for part in mixed.split(width, -1)), beta]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "heads"), [(16384, 96), (16383, 12), (1, 12), (65, 3), (7, 32)])
def test_bits(tokens, heads, dtype):
    """Check 17: random bit patterns, so NaN and subnormals are among them."""
    parts = projections(tokens, heads, dtype)
    for t in parts:
        bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
        limit = torch.iinfo(bits)
        t.copy_(torch.randint(limit.min, limit.max, t.shape, dtype=bits, device="cuda").view(dtype))
    counts.clear()
    for got, want in zip(pack(parts), parts, strict=True):
        assert got.is_contiguous()
        PACK.equality.check(got, want)
    assert counts["launches"] == (1 if tokens > 1 else 0)


def test_rows_beyond_2_31_elements():
    """Checks 17, 27."""
    tokens, stride = 65_536, 36_864
    wide = torch.zeros(tokens, stride, dtype=torch.bfloat16, device="cuda")
    wide[-3:] = torch.randn(3, stride, device="cuda").bfloat16()
    a, b = pack((wide[:, :128], wide[:, 128:384]))
    assert torch.equal(a[-4:], wide[-4:, :128])
    assert torch.equal(b[-4:], wide[-4:, 128:384])


def test_replay_with_changed_inputs():
    """Check 19: outputs are poisoned inside the capture."""
    parts = projections(300, 12)
    pack(parts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = pack(parts)
    for _ in range(3):
        for t in parts:
            t.copy_(torch.randn_like(t))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(out, parts, strict=True))

"""Latent attention and the norm chain at the shapes of the released models: they fit an H200 and spill nothing."""

import pytest
import torch

from anabranch.ops.kda_gate.triton import log_decay
from anabranch.ops.mla import balanced, cudnn
from anabranch.ops.mla.triton import mla_write

RANK, ROPE, PAGE = 512, 64, 64


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def indices(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int64)


@pytest.mark.parametrize("heads", [12, 32, 96])
@pytest.mark.parametrize("requests", [1, 8, 128])
def test_decode_step(compiled, heads, requests):
    wide = meta(requests, heads * 192 + RANK + ROPE + 64)
    q, kv = wide[:, : heads * 192].unflatten(1, (heads, 192)), wide[:, heads * 192 : heads * 192 + RANK + ROPE]
    places = (indices(requests), indices(requests), indices(requests, 576), meta(600, PAGE, RANK + ROPE))
    gate = (lambda: meta(requests, heads * 128 + 64)[:, 64:]) if heads != 32 else None
    balanced.mla_step(q, kv, meta(RANK), 1e-5, *places, meta(heads, 256, RANK), gate)
    used = compiled.check()
    names = ["mla_enter", "mla_attend", "mla_leave"]
    assert [u.name for u in used] == (names if requests == 1 else [*names, "mla_value"])
    early = ["griddepcontrol.wait" in u.ptx and "griddepcontrol.launch_dependents" in u.ptx for u in used]
    assert all(early)
    asked = [k.metadata.launch_pdl for k in compiled]
    # what reads the gate starts plainly: the gate may come from another stream
    assert asked == [True] * (len(used) - 1) + [gate is None]


def test_write_fetch_merge_and_gate(compiled):
    mla_write(meta(16, 6720)[:, 6144:], meta(RANK), 1e-5, indices(16), meta(600, PAGE, RANK + ROPE))
    for heads in (12, 32):
        tails = meta(100, heads, 192)[..., 128:]
        cudnn.fetch_rows(meta(600, PAGE, RANK + ROPE), indices(9), 28, meta(100, RANK), tails)
    part, sums = meta(16, 32, 128), meta(32, 16, dtype=torch.float32)
    cudnn.merge(part, sums, part, sums, torch.float32)
    cudnn.merge(meta(16, 32, 128, dtype=torch.float32), sums, part, sums, torch.bfloat16)
    for bound in (None, -5.0):
        log_decay(meta(16, 32, 128), meta(4096, dtype=torch.float32), meta(32, dtype=torch.float32), bound)
    assert len(compiled.check()) == 7

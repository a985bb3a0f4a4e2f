"""MXFP4 tiles on their own, and a plain bank that the expert kernels multiply in the order of an arranged one."""

import torch
import triton
import triton.language as tl
from helpers.banks import Mxfp4Bank, PlainBank

from anabranch.ops.mxfp4.reference import dequantize
from anabranch.ops.mxfp4.triton import arranged_tile


@triton.jit
def _unpack(codes, scale, y, columns, R: tl.constexpr, ASM: tl.constexpr):
    row = tl.program_id(0) * R + tl.arange(0, R)
    for start in range(0, columns, 128):
        tile = arranged_tile(codes, scale, row, start, columns, ASM)
        tl.store(y + row[:, None] * columns + (start + tl.arange(0, 128))[None, :], tile)


def arrangement(columns: int) -> torch.Tensor:
    """The column that stands at every place: of 16 words of 8, nibbles 0 and 4 of each, then 1 and 5, 2 and 6, 3, 7."""
    order = torch.arange(columns).view(-1, 16, 2, 4)  # block, word, half of a word, nibble of a half
    return order.permute(0, 3, 1, 2).flatten()


def every_code_and_scale(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 256 columns that hold every byte of codes under every scale: packed [512, 128], scale [512, 8]."""
    packed = torch.arange(256, dtype=torch.uint8).view(2, 128).repeat(256, 1)
    row, group = torch.arange(512)[:, None], torch.arange(8)[None, :]
    scale = ((row // 2 + group * 37) % 256).to(torch.uint8)
    return packed.to(device), scale.to(device)


def tiles_are_exact(device: str, asm: bool) -> None:
    """Every value and every NaN, signed zeros too; of four bytes of scales some are special and some are not."""
    packed, scale = every_code_and_scale(device)
    got = torch.full((512, 256), torch.nan, dtype=torch.bfloat16, device=device)
    _unpack[(8,)](packed, scale, got, 256, R=64, ASM=asm)
    want = dequantize(packed, scale, torch.bfloat16)[:, arrangement(256).to(device)]
    assert torch.equal(got.isnan(), want.isnan())
    known = ~want.isnan()
    assert torch.equal(got.view(torch.int16)[known], want.view(torch.int16)[known])


def in_arranged_order(bank: Mxfp4Bank) -> tuple[PlainBank, torch.Tensor]:
    """The dequantised bank with its columns, and the rows that become columns of `down`, arranged; the order of x."""
    w13 = torch.stack([bank.gate_up(e) for e in range(bank.count)])
    w2 = torch.stack([bank.down(e) for e in range(bank.count)])
    outer, inner = arrangement(w13.shape[2]).to(w13.device), arrangement(w2.shape[2]).to(w13.device)
    rows = torch.cat([inner, inner + len(inner)])
    plain = PlainBank(first=bank.first, count=bank.count, w13=w13[:, rows][:, :, outer], w2=w2[:, :, inner])
    return plain, outer

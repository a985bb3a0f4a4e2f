"""The decay gate in the interpreter."""

import pytest
import torch

from anabranch.ops.kda_gate import reference
from anabranch.ops.kda_gate.spec import KDA_GATE
from anabranch.ops.kda_gate.triton import log_decay


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bound", [None, -5.0])
def test_gate_equals_the_reference_and_a_token_knows_no_other(dtype, bound):
    torch.manual_seed(0)
    heads, dim = 5, 20
    forget = (torch.randn(7, heads * dim + 9) * 12).to(dtype)[:, 9:].unflatten(-1, (heads, dim))
    args = (torch.randn(heads * dim), torch.randn(heads), bound)
    got = log_decay(forget, *args)
    assert (forget.float() + args[0].view(heads, dim) > 20).any(), "both branches of softplus"
    KDA_GATE.equality.check(got, reference.log_decay(forget, *args))
    assert torch.equal(log_decay(forget[2:3], *args), got[2:3])
    assert log_decay(forget[:0], *args).shape == (0, heads, dim)

"""FlashKDA through its adapter, where the package is installed: outputs and states of the reference."""

import pytest
import torch
from helpers.kda_prefill import error, fresh, prompt_inputs

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("flash_kda")

from anabranch.ops.kda_prefill import reference
from anabranch.ops.kda_prefill.flash import kda_prompt
from anabranch.ops.kda_prefill.spec import KDA_PROMPT


@pytest.mark.parametrize(("heads", "lengths"), [(12, [1, 65, 640, 16]), (32, [1000])])
def test_ragged_batch(heads, lengths):
    given = prompt_inputs(lengths, heads, padding=3, device="cuda")
    given["slots"][0] = -1 if len(lengths) > 1 else given["slots"][0]
    before, want = given["state"].clone(), fresh(given)
    got = kda_prompt(**given)
    used = sum(lengths)
    KDA_PROMPT.equality.check(got[:used], reference.kda_prompt(**want)[:used], "o")
    assert not got[used:].any()
    live = given["slots"][given["slots"] >= 0]
    assert error(given["state"][live], want["state"][live]) < 1.5e-2
    idle = [s for s in range(len(before)) if s not in live.tolist()]
    assert torch.equal(given["state"][idle], before[idle])

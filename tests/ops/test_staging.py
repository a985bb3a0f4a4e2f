"""Host numbers on their way to a device."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from anabranch.ops.staging import together

NUMBERS = st.integers(-(2**62), 2**62)


@given(st.lists(st.lists(NUMBERS, max_size=40), min_size=1, max_size=6), st.integers(1, 5))
def test_parts_of_one_copy_keep_shape_values_and_alignment(lists, rows):
    given = {f"part {i}": [values] * rows if i % 2 else values for i, values in enumerate(lists)}
    placed = together("cpu", **given)
    assert list(placed) == list(given)
    start = next(iter(placed.values())).untyped_storage().data_ptr()
    for name, values in given.items():
        want = torch.from_numpy(np.array(values, dtype=np.int64))
        assert torch.equal(placed[name], want)
        assert not want.numel() or (placed[name].data_ptr() - start) % 128 == 0
        assert placed[name].is_contiguous()

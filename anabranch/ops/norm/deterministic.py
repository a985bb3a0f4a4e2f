"""Norms with a fixed order of addition."""

from functools import partial

from anabranch.ops.arithmetic import fold_sum
from anabranch.ops.norm import reference

rms_norm = partial(reference.rms_norm, total=fold_sum)
add_rms_norm = partial(reference.add_rms_norm, total=fold_sum)
l2_norm = partial(reference.l2_norm, total=fold_sum)
gated_rms_norm = partial(reference.gated_rms_norm, total=fold_sum)

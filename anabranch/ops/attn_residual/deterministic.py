"""The residual read with a fixed order of addition."""

from functools import partial

from anabranch.ops.arithmetic import fold_sum
from anabranch.ops.attn_residual import reference

residual_norm = partial(reference.residual_norm, total=fold_sum)

"""The delta-rule step with a fixed order of addition."""

from functools import partial

from anabranch.ops.arithmetic import fold_sum
from anabranch.ops.kda_decode import reference

kda_decode = partial(reference.kda_decode, total=fold_sum)

"""The producer layouts with a fixed order of addition in the norms."""

from functools import partial

from anabranch.ops.arithmetic import fold_sum
from anabranch.ops.kda_inputs import reference

kda_inputs = partial(reference.kda_inputs, total=fold_sum)

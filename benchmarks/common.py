"""What every benchmark script shares; the measuring itself lives in `anabranch.measure`."""

from anabranch.measure.rows import ROOT, append_row, provenance
from anabranch.measure.timing import COPY_BYTES_PER_S as BYTES_PER_S
from anabranch.measure.timing import FLOPS_PER_S, floor_us, measured, time_graph

__all__ = ["BYTES_PER_S", "FLOPS_PER_S", "ROOT", "append_row", "floor_us", "measured", "provenance", "time_graph"]

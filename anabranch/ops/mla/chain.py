"""No decode step in one piece: the layer writes, attends and gates as the operations they are."""

mla_step = None

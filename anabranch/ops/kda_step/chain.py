"""No fused step: the layer runs conv, norms, gate, delta rule and gated norm as the operations they are."""

kda_step = None

"""No producer layout: the layer runs convolution, norms and sigmoid as the operations they are."""

kda_inputs = None

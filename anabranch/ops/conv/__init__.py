"""Short causal depthwise convolution + SiLU over a ragged batch, with its history in a slot pool."""

"""Block-FP8 weights: E4M3 codes under one fp32 scale for each 128 x 128 block, multiplied by wider activations."""

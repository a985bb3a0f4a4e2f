"""Matrix products with weights: y = x W^T, one at a time or several of one shape together."""

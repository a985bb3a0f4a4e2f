"""Routed experts: the weighted sum of each token's chosen GLU blocks."""

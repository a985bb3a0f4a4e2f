"""No common launches: the layer runs the separate operations."""

expert_ffn = None

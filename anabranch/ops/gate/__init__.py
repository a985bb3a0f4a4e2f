"""The MLA output gate: x * sigmoid(g)."""

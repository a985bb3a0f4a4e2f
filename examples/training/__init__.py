"""Trains the small Kimi-K3 that the project ships: data, training step, export (docs/small_model.md)."""

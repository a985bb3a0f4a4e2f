"""Expert choice: scores, correction bias, grouped top-k, weights."""

"""Log probabilities of the vocabulary."""

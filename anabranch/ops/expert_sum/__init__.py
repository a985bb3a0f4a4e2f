"""The weighted sum of each token's expert outputs, with what is added to it."""

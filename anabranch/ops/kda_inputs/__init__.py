"""The short convolution written in the layout that the prefill kernel reads: dense q, k, v, with norms and beta."""

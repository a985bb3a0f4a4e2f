"""Matrix products with few tokens at memory speed (CUDA, Hopper), and the KDA prologue in one launch."""

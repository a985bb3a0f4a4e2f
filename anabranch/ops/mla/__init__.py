"""NoPE latent attention over paged cache rows: explicit form for prefill, absorbed form for decode."""

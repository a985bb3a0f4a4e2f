"""Gated linear units: SwiGLU and SiTU."""

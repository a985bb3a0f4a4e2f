"""Where there is no one-launch prologue, its products stay apart."""

gemm_low_rank = None

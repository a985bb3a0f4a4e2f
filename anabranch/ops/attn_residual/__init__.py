"""Block attention residual read (Kimi-K3): a softmax mixture over banked rows and the running sum."""

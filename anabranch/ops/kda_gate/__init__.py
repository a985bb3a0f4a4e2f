"""The log decay of KDA: softplus gate (Kimi-Linear) and bounded gate (Kimi-K3)."""

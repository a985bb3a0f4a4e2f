"""RMSNorm and the per-head gated RMSNorm of KDA."""

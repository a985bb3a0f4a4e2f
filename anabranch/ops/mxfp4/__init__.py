"""MXFP4 (OCP microscaling) weights: E2M1 codes in pairs, one E8M0 scale for 32 columns."""

"""The gated delta rule over whole segments, chunk by chunk."""

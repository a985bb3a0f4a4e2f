"""One decode step of the gated delta rule, in place on the state pool."""

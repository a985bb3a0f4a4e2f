"""The experts of one FFN, routed and shared, with what is added to them: as few launches as it takes."""

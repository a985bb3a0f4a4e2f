"""Several strided tensors made dense in one launch."""

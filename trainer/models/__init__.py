"""Changes to a model: sharded tensors, BatchNorm over the global batch, memory format."""

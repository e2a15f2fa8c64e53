"""What is done to a model: sharded tensors, BatchNorm over the global batch, memory format."""

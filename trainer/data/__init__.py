"""Loaders: which sample goes to which rank, and the batches that each rank gets."""

"""Which sample goes to which rank, and the batches that are made of them."""

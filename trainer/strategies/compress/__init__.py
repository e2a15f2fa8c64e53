"""Low-communication training: send low-rank factors of gradients, or the weights after several local steps."""

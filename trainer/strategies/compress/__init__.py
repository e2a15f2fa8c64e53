"""What is sent in place of the gradients: low-rank factors, or the weights after several local steps."""

"""The parameter server: a process that adds up gradients, and the strategy whose ranks push and pull them."""

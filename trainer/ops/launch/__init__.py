"""`trainer.launch`: runs a function on several ranks, from a script or a notebook, and returns their results."""

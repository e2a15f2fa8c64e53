"""The training loop as a class, `Trainer`, and the state that it carries from epoch to epoch."""

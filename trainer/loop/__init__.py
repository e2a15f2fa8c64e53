"""From a batch to an optimizer step, both for a user's loop and for `Trainer`."""

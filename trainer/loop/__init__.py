"""What happens between a batch and a step, for a loop of one's own and for `Trainer`'s alike."""

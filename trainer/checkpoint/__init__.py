"""Checkpoints: `disk` knows what a committed checkpoint is, `run` what belongs into one, when, and how to go on."""

"""Strategies for readers of the texts on distributed training, not for daily use."""

"""The same training with other libraries and with trainer, in pairs: docs/coming-from-*.md shows what differs."""

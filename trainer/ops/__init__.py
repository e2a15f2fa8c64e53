"""Commands around a training: `trainer run`, `trainer doctor`, `trainer submit`. They start without PyTorch."""

"""Commands around a training: `trainer run`, `trainer doctor`, `trainer requeue`. They start without PyTorch."""

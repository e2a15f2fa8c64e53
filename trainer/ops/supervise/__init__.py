"""`trainer run`: starts a job, watches it, and starts it again after a failure. Imports no PyTorch."""

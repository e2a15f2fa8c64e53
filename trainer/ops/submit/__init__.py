"""`trainer submit`: writes a job file for a cluster's scheduler, and submits it. Imports no PyTorch."""

"""`trainer doctor`: looks at hosts, and at the network between them, before a job does. Imports no PyTorch."""

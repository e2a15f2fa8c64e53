"""`trainer doctor`: examine hosts, and the network between them, before a job runs there. Imports no PyTorch."""

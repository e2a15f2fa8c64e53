"""Programs that `trainer doctor` sends to every host and runs there, as one call each.

They import the standard library only, and run on Python 3.8; `all_reduce.py` alone needs the job's PyTorch.
"""

"""Programs that `trainer doctor` sends to every host and runs there, each as one call.

They import the standard library only and run on Python 3.8, so that a host can be looked at where the library is
missing or of another version; `all_reduce.py` alone needs the job's PyTorch.
"""

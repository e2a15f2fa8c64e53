"""Python source that `trainer doctor` sends to every host and runs there.

Each file imports the standard library only, and runs on Python 3.8, so that a host can be looked at where the library
is missing or of another version; `all_reduce.py` alone needs the job's PyTorch. `facts.py` runs `machine.py`,
`software.py`, `addresses.py` and `gpus.py`, `network.py` and `all_reduce.py` run by themselves.
"""

"""Targets for a fuzzer: each parser of what comes from a network, or from a disk that others can write.

`python -m tests.security.fuzz` (or `make fuzz`) sends inputs to all of them, and prints a table.
"""

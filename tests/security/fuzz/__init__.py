"""Targets for a fuzzer: each parser of what comes from a network, or from a disk that others can write.

tests/security/test_fuzz.py sends inputs to all of them; `make fuzz` a hundred thousand.
"""

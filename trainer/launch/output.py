"""Printing whole lines from several ranks at once."""

from __future__ import annotations

import sys


def print_line(text: str) -> None:
    """Print a line with a single write, because mpirun prefixes every write with its rank."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()

"""Printing whole lines from several ranks at once."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TextIO

_clear_bar: Callable[[], object] | None = None


def keep_lines_off(clear_bar: Callable[[], object] | None) -> None:
    """Have `print_line` clear a progress bar first, which is drawn anew with the next progress; None ends that."""
    global _clear_bar
    _clear_bar = clear_bar


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print one or more lines with a single write, because launchers mix the ranks' output between writes.

    Args:
        stream: standard output when None.
    """
    if _clear_bar is not None:
        _clear_bar()
    stream = sys.stdout if stream is None else stream
    stream.write(f"{text}\n")
    stream.flush()


def say(lines: Sequence[str], prefix: str = "trainer: ") -> None:
    """Print lines on this process's standard error with a single write, whatever Python has made of `sys.stderr`."""
    with suppress(OSError):  # nobody reads any more
        os.write(2, "".join(f"{prefix}{line}\n" for line in lines).encode())


def warn(text: str) -> None:
    """Print a warning, as `say` prints lines."""
    say([f"WARNING: {text}"])


def write_whole_lines() -> None:
    """Have this process's standard output and standard error write when a line ends, with one write a line.

    Python writes every piece of a line by itself under `python -u`, with which torchrun starts its ranks, and under
    PYTHONUNBUFFERED, which many container images set: `print("loss", loss)` is then four writes, between which the
    launcher puts those of other ranks. Into a pipe, as under horovodrun, it keeps lines back until there are 8 KiB.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not what a notebook or a test has put there
            with suppress(OSError, ValueError):  # nobody reads any more, or it is closed
                stream.reconfigure(line_buffering=True, write_through=False)

"""What ranks print, passed on byte by byte, and what the launcher itself has to say."""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import IO, TextIO

# A line that has no end is passed on in pieces of this length.
LONGEST_LINE = 2**20
# How long a pipe may be silent after its program has ended, before nothing more is expected of it.
LAST_WORDS_S = 5.0
# Lines of several ranks go to one file, each whole.
_FILE_LOCKS: dict[int, threading.Lock] = {}
# What mpirun frames when a rank has failed, and a frame that has begun. Whatever else it frames is passed on.
_FRAME = re.compile(rb"^-{74}\n(?:Primary job|mpirun (?:detected|noticed) that).*?^-{74}\n", re.MULTILINE | re.DOTALL)
_BEGUN = re.compile(
    rb"^-{1,74}\Z|^-{74}\n(?:Primary job|mpirun (?:detected|noticed) that|[^\n-]{0,20}\Z).*\Z", re.MULTILINE | re.DOTALL
)
_KILLED = re.compile(rb"process rank (\d+) .*?on node (\S+) exited on (signal \d+(?: \([^)]*\))?)", re.DOTALL)
_FAILED_WITH = re.compile(rb"Process name: \[.*,(\d+)\]\s+Exit code: +(\d+)")
# Names of the streams that could not be written, which is told once.
_FAILED: set[str] = set()


def print_if_read(line: object, stream: TextIO | None = None) -> None:
    """Print a line, where somebody still reads it."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=stream or sys.stdout, flush=True)


def say(line: object) -> None:
    """Tell the user something about the job."""
    print_if_read(f"horovodrun: {line}", sys.stderr)


def forward(stream: TextIO, data: bytes) -> None:
    """Write bytes, whatever they are, to a text stream. One that is no file, such as a notebook's, gets text.

    Raises:
        OSError: they cannot be written.
        ValueError: the stream has been closed.
    """
    try:
        descriptor = stream.fileno() if isinstance(stream, io.TextIOWrapper) else None
    except OSError:
        descriptor = None
    if descriptor is None:
        stream.write(data.decode("utf-8", errors="replace"))
        stream.flush()
        return
    # Past the stream's buffer: it would keep, and write again and again, what a full disk does not take.
    with contextlib.suppress(OSError):
        stream.flush()
    with _FILE_LOCKS.setdefault(descriptor, threading.Lock()):
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:  # a program beside this one has set the terminal so
                select.select([], [descriptor], [])


def _forward_or_tell(stream: TextIO, data: bytes, on_broken_pipe: Callable[[], None] | None) -> None:
    """Never raises: the command would wait for ever for somebody who reads what it prints."""
    try:
        forward(stream, data)
    except BrokenPipeError:
        if on_broken_pipe:
            on_broken_pipe()
    except (OSError, ValueError) as error:
        name = str(getattr(stream, "name", "the output"))
        if name not in _FAILED:
            _FAILED.add(name)
            why = getattr(error, "strerror", None) or error
            say(f"cannot write to {name}: {why}; the job goes on, and output is lost")


def prefix_connection(
    source: Connection,
    sinks: TextIO | list[TextIO],
    prefix: str,
    index: int | None,
    with_time: bool,
    on_broken_pipe: Callable[[], None] | None = None,
) -> None:
    """Pass on what comes from a pipe, to its end; what the sinks do not take is lost.

    Args:
        source: the pipe, which is closed in the end.
        sinks: text streams.
        prefix: the name of the stream, which each line gets before it.
        index: the rank, which comes before that; without one, lines are passed on as they are.
        with_time: whether the time comes before all.
        on_broken_pipe: called when nobody reads a sink any more.
    """

    def write(line: bytes) -> None:
        if index is not None:
            line = f"{time.asctime() if with_time else ''}[{index}]<{prefix}>:".encode() + line
        for stream in sinks if isinstance(sinks, list) else [sinks]:
            _forward_or_tell(stream, line, on_broken_pipe)

    kept = b""
    while True:
        read = os.read(source.fileno(), 65536)  # what there is, as soon as there is anything
        # A line ends with \n or \r, the latter where it is written again and again, as a progress bar is.
        *lines, rest = re.split(rb"(?<=\n)|(?<=\r)(?!\n)", read)
        for line in lines:
            write(kept + line)
            kept = b""
        kept += rest
        if kept and (not read or len(kept) >= LONGEST_LINE):
            write(kept)
            kept = b""
        if not read:
            break
    source.close()


def pass_on_without_frames(source: IO[bytes], ended: threading.Event) -> None:
    """Pass mpirun's stderr on, to its end, with a line of our own in place of its frames about a rank that failed.

    Args:
        source: the pipe, which is closed in the end.
        ended: set when mpirun has ended. What it has started may keep the pipe open longer, and is not waited for.
    """
    unread = threading.Event()
    kept = b""
    lines: list[bytes] = []

    def line_for(frame: re.Match[bytes]) -> bytes:
        lines.append(_line_for(frame))
        return lines[-1]

    with source:
        while not unread.is_set():
            if not select.select([source], [], [], LAST_WORDS_S)[0]:
                if ended.is_set():
                    break
                continue
            read = os.read(source.fileno(), 65536)
            if not read:
                break
            kept = _FRAME.sub(line_for, kept + read)
            begun = _BEGUN.search(kept)
            end = begun.start() if begun and len(kept) < LONGEST_LINE else len(kept)
            _forward_or_tell(sys.stderr, kept[:end], unread.set)
            kept = kept[end:]
    if lines and not any(lines):  # mpirun may end before it has written the second frame, which names the rank
        kept += b"horovodrun: a rank failed; mpirun did not say which one\n"
    _forward_or_tell(sys.stderr, kept, unread.set)


def _line_for(frame: re.Match[bytes]) -> bytes:
    if killed := _KILLED.search(frame[0]):
        return b"horovodrun: rank %b on %b was ended by %b\n" % killed.groups()
    if failed := _FAILED_WITH.search(frame[0]):
        return b"horovodrun: rank %b ended with exit code %b\n" % failed.groups()
    return b"" if b"Primary job" in frame[0] else frame[0]

"""What ranks print: each line begins with its rank in brackets, whichever launcher passes it on."""

from __future__ import annotations

import codecs
import io
import os
import re
import subprocess
import sys
from contextlib import suppress

# mpirun marks each piece that a rank writes, horovodrun --gloo each line.
_MARK = re.compile(r"\[(?P<job>\d+,)?(?P<rank>\d+)\]<std(?:out|err)>:(?P<next>[\r\n]?)")
_BEGUN_MARK = re.compile(r"\[[\d,]{0,12}(?:\](?:<[a-z]{0,6}(?:>:?)?)?)?\Z")
_LINE_ENDS = re.compile(r"(?<=\n)(?!\Z)|(?<=\r)(?!\n|\Z)")


class Tags:
    """Turns a stream of a launcher's output into plain text, with `[rank] ` in place of the launcher's own marks."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._kept = ""

    def text(self, data: bytes) -> str:
        """Return the text that can be shown so far. Empty data means that the stream has ended."""
        text = self._kept + self._decoder.decode(data, final=not data)
        self._kept = ""
        if data and (begun := _BEGUN_MARK.search(text)):
            text, self._kept = text[: begun.start()], text[begun.start() :]
        return _MARK.sub(_tag, text)


def _tag(mark: re.Match[str]) -> str:
    rank, following = f"[{mark['rank']}] ", mark["next"]
    # A progress bar goes back to the beginning of its line, where the rank belongs, and at last ends this line.
    if mark["job"] and following:
        return f"\r{rank}" if following == "\r" else following
    return rank + following


class Output:
    """Context with a pipe for each of a job's two streams; both are printed on this process's own.

    It prints from the caller's thread, because a notebook may show another thread's output below another cell. The
    pipes do not end with the job, so a process that outlives it does not keep anyone waiting.
    """

    def __enter__(self) -> Output:
        (printed, output), (said, errors) = os.pipe(), os.pipe()
        self.descriptors = (printed, said)
        """Descriptors that become readable when the job prints something."""
        self.streams = (subprocess.DEVNULL, output, errors)
        """Standard input, output and error for the job."""
        for reader in self.descriptors:
            os.set_blocking(reader, False)
        self._tags = (Tags(), Tags())
        return self

    def __exit__(self, *_: object) -> None:
        while self.print():
            pass
        for tags, name in zip(self._tags, ("stdout", "stderr"), strict=True):
            _print(tags.text(b""), name)
        for descriptor in (*self.descriptors, *self.streams[1:]):
            os.close(descriptor)

    def print(self) -> bool:
        """Print what the job has printed since; return whether there was something."""
        any_read = False
        for reader, tags, name in zip(self.descriptors, self._tags, ("stdout", "stderr"), strict=True):
            with suppress(BlockingIOError):
                _print(tags.text(os.read(reader, 65536)), name)
                any_read = True
        return any_read


def _print(text: str, name: str) -> None:
    # The stream is looked up at each call, because a test or a notebook may replace it. Its reader may be gone.
    stream = getattr(sys, name)
    if text and stream is not None:
        with suppress(OSError, ValueError):
            stream.write(text)
            stream.flush()


class _TaggedStream(io.TextIOWrapper):
    """Standard output or error of a rank whose launcher does not say who prints."""

    tag: str
    _at_start = True

    def write(self, text: str, /) -> int:
        if text:
            first, *others = _LINE_ENDS.split(text)
            super().write("".join([self.tag if self._at_start else "", first, *(self.tag + line for line in others)]))
            self._at_start = text.endswith(("\n", "\r"))
        return len(text)


def tag_output(rank: int) -> None:
    """Prefix each line that this process prints with its rank, and write the output line by line."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        tagged = _TaggedStream(stream.detach(), stream.encoding, stream.errors, line_buffering=True)
        tagged.tag = f"[{rank}] "
        setattr(sys, name, tagged)
        setattr(sys, f"__{name}__", tagged)

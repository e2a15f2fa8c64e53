"""The Python stacks of a process, asked for from outside, and what they tell.

The stacks come from `faulthandler`, which is in the standard library: its handler writes them without asking for the
interpreter's lock, so that a rank which holds it in C code is seen too, and no permission to trace is needed. The rank
has registered it for `SIGNAL`, with a file in memory. A process that is stopped, or has the signal blocked, has none.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from trainer.ops.watcher.job import WORKS
from trainer.watch.heartbeat import SIGNAL
from trainer.watch.stack import Frame, is_in_backward

STOPPED, TRACED, UNINTERRUPTIBLE = "T", "t", "D"
"""States of a process, beside `trainer.cluster.processes.GONE`."""
_WRITTEN_S, _SETTLED_S = 3.0, 0.15
_MOST_BYTES = 256 * 1024
_FRAME = re.compile(r'  File "(?P<path>.*)", line (?P<line>\d+) in (?P<name>.*)')
# Those of a compiler at work; other files of torch._dynamo are in the stack of every compiled model that runs.
_COMPILER = re.compile(
    r"/torch/(_dynamo/convert_frame|_inductor/(compile_fx|async_compile))\.py$|/triton/(compiler|backends)/"
)
_DEBUGGER = re.compile(r"/(pdb|bdb)\.py$|/(pydevd|debugpy|_pydevd_bundle|ipdb|pudb)(/|\.py$)")
# It writes or reads a file, which a slow disk keeps from computing.
_SAVES = re.compile(r"/torch/(serialization\.py$|distributed/checkpoint/)")
_LIBRARY = f"{Path(__file__).resolve().parents[2]}/"
_NOT_THE_USERS = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", _LIBRARY)


def takes_signal(pid: int) -> bool:
    """Return whether a process has a handler for `SIGNAL`, without which the signal would end it."""
    with suppress(OSError, ValueError, KeyError):
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        masks = dict(line.split(":\t") for line in status.splitlines() if line.startswith(("SigBlk", "SigCgt")))
        bit = 1 << (SIGNAL - 1)
        return bool(int(masks["SigCgt"], 16) & bit and not int(masks["SigBlk"], 16) & bit)
    return False


def wait_for_stacks(files: Mapping[int, int]) -> None:
    """Return once something was written to each file and no more comes, after 3 s in any case.

    Args:
        files: descriptors, and how many bytes each had before.
    """
    deadline, sizes = time.monotonic() + _WRITTEN_S, dict(files)
    while files and time.monotonic() < deadline:
        time.sleep(_SETTLED_S)
        now = {file: os.fstat(file).st_size for file in files}
        if now == sizes and all(now[file] > before for file, before in files.items()):
            return
        sizes = now


def read_stacks(file: int, before: int) -> str:
    """Return what was written to the file since it had `before` bytes."""
    return os.pread(file, _MOST_BYTES, before).decode(errors="replace")


def frames_of(stacks: str) -> list[Frame]:
    """Return the frames of all threads."""
    return [Frame(line["path"], int(line["line"]), line["name"]) for line in _FRAME.finditer(stacks)]


def main_frames(stacks: str, thread: int) -> list[Frame]:
    """Return the frames of the main thread, the innermost first, without those of the heartbeat.

    Args:
        stacks: as faulthandler writes them.
        thread: the main thread's ident.
    """
    for part in re.split(r"\n\s*\n", stacks):
        if re.match(rf"\s*(?:Current thread|Thread) 0x0*{thread:x} ", part):
            return [frame for frame in frames_of(part) if not frame.path.endswith("/trainer/watch/heartbeat.py")]
    return []


def excuse_of(frames: Sequence[Frame], all_frames: Sequence[Frame]) -> str:
    """Return why a rank may be without progress, by its stacks: "debugger", "compiles", `WORKS`; "" if none tells.

    Args:
        frames: of the main thread.
        all_frames: of all threads: of a backward pass on a GPU, it is autograd's thread that compiles.
    """
    if _any(_DEBUGGER, frames):
        return "debugger"
    if _any(_COMPILER, all_frames):
        return "compiles"
    return WORKS if _any(_SAVES, frames) or is_in_backward(frames) else ""


def is_users(frame: str) -> bool:
    """Return whether a frame, as it is printed, is of the user's own files."""
    return not any(part in frame for part in _NOT_THE_USERS)


def place_of(frames: Sequence[Frame]) -> str:
    """Return where the user's own code is, such as "train.py:31"; "" where none is known."""
    return next((f"{Path(frame.path).name}:{frame.line}" for frame in frames if is_users(str(frame))), "")


def _any(pattern: re.Pattern[str], frames: Sequence[Frame]) -> bool:
    return any(pattern.search(frame.path) for frame in frames)

"""The Python stacks of a process, seen from outside, and what they tell: what it waits for, or that it is at work.

The stacks come from `faulthandler`, which is in the standard library: its handler writes them without asking for the
interpreter's lock, so that a rank which holds it in C code is seen too, and no permission to trace is needed. The rank
has registered it for `SIGNAL`, with a file in memory. A process that is stopped, or has the signal blocked, has none.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

SIGNAL = getattr(signal, "SIGRTMAX", 64) - 5
"""Nobody else's: of PyTorch, MPI, NCCL and the schedulers none takes it, and it is far from both ends of the range."""
STOPPED, TRACED, UNINTERRUPTIBLE = "T", "t", "D"
"""States of a process, beside `trainer.cluster.processes.GONE`."""
_WRITTEN_S, _SETTLED_S = 3.0, 0.15
_MOST_BYTES = 256 * 1024
_FRAME = re.compile(r'  File "(?P<path>.*)", line (?P<line>\d+) in (?P<name>.*)')


@dataclass(frozen=True)
class Frame:
    """A line of a stack."""

    path: str
    line: int
    name: str

    def __str__(self) -> str:
        return f'File "{self.path}", line {self.line}, in {self.name}'


def ask_for_stacks(pid: int) -> bool:
    """Have a process write its stacks; return whether it can. Never sends a signal that would end it."""
    with suppress(OSError, ValueError):
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        masks = dict(line.split(":\t") for line in status.splitlines() if line.startswith(("SigBlk", "SigCgt")))
        bit = 1 << (SIGNAL - 1)
        if int(masks["SigCgt"], 16) & bit and not int(masks["SigBlk"], 16) & bit:
            os.kill(pid, SIGNAL)
            return True
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


def all_frames(stacks: str) -> list[Frame]:
    """Return the frames of all threads."""
    return [Frame(line["path"], int(line["line"]), line["name"]) for line in _FRAME.finditer(stacks)]


def main_frames(stacks: str, thread: int) -> list[Frame]:
    """Return the frames of the main thread, the innermost first, without those that only note what it does.

    Args:
        stacks: as faulthandler writes them.
        thread: the main thread's ident.
    """
    for part in re.split(r"\n\s*\n", stacks):
        if re.match(rf"\s*(?:Current thread|Thread) 0x0*{thread:x} ", part):
            return [frame for frame in all_frames(part) if not frame.path.endswith("/trainer/watch/heartbeat.py")]
    return []


# Those of a compiler at work; other files of torch._dynamo are in the stack of every compiled model that runs.
_COMPILER = re.compile(
    r"/torch/(_dynamo/convert_frame|_inductor/(compile_fx|async_compile))\.py$|/triton/(compiler|backends)/"
)
_DEBUGGER = re.compile(r"/(pdb|bdb)\.py$|/(pydevd|debugpy|_pydevd_bundle|ipdb|pudb)(/|\.py$)")
_SAVES = re.compile(r"/torch/(serialization\.py$|distributed/checkpoint/)")


def compiles(frames: list[Frame]) -> bool:
    """Return whether `torch.compile` is at work."""
    return any(_COMPILER.search(frame.path) for frame in frames)


def is_debugged(frames: list[Frame]) -> bool:
    """Return whether a debugger waits for its user."""
    return any(_DEBUGGER.search(frame.path) for frame in frames)


def saves(frames: list[Frame]) -> bool:
    """Return whether PyTorch writes or reads a file, which a slow disk keeps from computing."""
    return any(_SAVES.search(frame.path) for frame in frames)


def waits_in(frames: list[Frame], cpu: float, *, is_recorded: bool = False) -> str:
    """Return what a rank waits for that has noted no collective: DDP's own, or one of the user's; "" without one.

    Args:
        cpu: share of a processor that the main thread takes. In the backward pass of autograd one that waits takes
            none, and one that computes takes all.
        is_recorded: whether the flight recorder tells that no collective waits. In the backward pass the main thread
            then waits for a thread of autograd's, and that one for nobody else.
    """
    if not frames or ((cpu > 0.2 or is_recorded) and is_in_backward(frames)):
        return ""
    return waits_for([(frame.path, frame.name) for frame in frames])


_NOT_THE_USERS = (
    "/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", f"{Path(__file__).resolve().parent.parent}/"
)  # fmt: skip


def is_users(frame: str) -> bool:
    """Return whether a frame, as it is printed, is of the user's own files."""
    return not any(part in frame for part in _NOT_THE_USERS)


def place_of(frames: list[Frame]) -> str:
    """Return where the user's own code is, such as "train.py:31"; "" where none is known."""
    return next((f"{Path(frame.path).name}:{frame.line}" for frame in frames if is_users(str(frame))), "")


def is_in_backward(frames: list[Frame]) -> bool:
    """Return whether autograd has been called last: it computes, or waits for its threads, one a GPU."""
    return bool(frames) and bool(_BACKWARD.search(frames[0].path))


_BACKWARD = re.compile(r"/torch/autograd/graph\.py$")
_DDP = re.compile(r"/torch/nn/parallel/distributed\.py$")
_FULLY_SHARD = re.compile(r"/torch/distributed/fsdp/")
_TORCH = re.compile(r"/torch/distributed/(?!c10d_logger\.py$)")  # whose decorator is around most functions
_HOROVOD = re.compile(r"/horovod/torch/")
_SYNC_BATCH_NORM = re.compile(r"/torch/nn/modules/_functions\.py$|/horovod/torch/sync_batch_norm\.py$")
# In the innermost line of a rank that waits. Other files of torch.distributed compute and write as well.
_WAITS = re.compile(
    rf"{_DDP.pattern}|{_BACKWARD.pattern}|{_FULLY_SHARD.pattern}|{_HOROVOD.pattern}"
    r"|/torch/distributed/(distributed_c10d|_functional_collectives)\.py$"
)
# A differentiable collective calls itself through autograd.
_LIBRARIES = re.compile(rf"{_DDP.pattern}|/torch/distributed/|{_HOROVOD.pattern}|/torch/autograd/function\.py$")

Call = tuple[str, str]
"""File and name of a function that is being called."""


def waits_for(calls: Sequence[Call]) -> str:
    """Return what a rank with this stack waits for; "" where it does not.

    A collective has the name of the outermost function of its library, which is the one that the user has called.

    Args:
        calls: the innermost first.
    """
    if not calls or not _WAITS.search(calls[0][0]):
        return ""
    inner = list(takewhile(lambda call: _LIBRARIES.search(call[0]), calls))
    around = calls[len(inner) : len(inner) + 1]
    for path, name in (*inner, *around):
        if _SYNC_BATCH_NORM.search(path):
            return f"SyncBatchNorm's {name} pass"
    if _any(_DDP, inner):
        return "DDP's forward pass" if any(name in ("forward", "_pre_forward") for _, name in inner) else "gradients"
    if _any(_FULLY_SHARD, inner):
        return "gradients" if _any(_BACKWARD, calls) else "fully_shard's forward pass"
    for library, pattern in (("horovod.torch", _HOROVOD), ("torch.distributed", _TORCH)):
        if names := [name for path, name in inner if pattern.search(path)]:
            return f"{library}.{names[-1]}"
    return "gradients"


def _any(pattern: re.Pattern[str], calls: Sequence[Call]) -> bool:
    return any(pattern.search(path) for path, _ in calls)

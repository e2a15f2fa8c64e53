"""A look at a process from outside: its state, the time that its main thread computes, and its Python stacks.

The stacks come from `faulthandler`, which is in the standard library: its handler writes them without asking for the
interpreter's lock, so that a rank which holds it in C code is seen too, and no permission to trace is needed. The rank
has registered it for `SIGNAL`, with a file in memory. A process that is stopped, or has the signal blocked, has none.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.watch.stacks import waits_for

SIGNAL = getattr(signal, "SIGRTMAX", 64) - 5
"""Nobody else's: of PyTorch, MPI, NCCL and the schedulers none takes it, and it is far from both ends of the range."""
GONE, STOPPED, TRACED, UNINTERRUPTIBLE = "X", "T", "t", "D"
_TICKS_S = os.sysconf("SC_CLK_TCK")
_WRITTEN_S, _SETTLED_S = 3.0, 0.15
_MOST_BYTES = 256 * 1024
_FRAME = re.compile(r'  File "(?P<path>.*)", line (?P<line>\d+) in (?P<name>.*)')


@dataclass(frozen=True)
class Process:
    """What /proc says of a process."""

    state: str
    """The kernel's letter; "X" for a process that is gone."""
    started: int
    """By which it is told from a later one of the same number; clock ticks since the boot."""
    cpu_s: float
    """Processor time of the thread that trains."""
    parent: int = 0


def look(pid: int, started: int = 0, thread: int = 0) -> Process:
    """Look at a process.

    Args:
        started: of the one that is meant; 0 takes any.
        thread: the thread that trains; 0 is the main thread.
    """
    found = _read(Path(f"/proc/{pid}/stat"))
    if found is None or (started and found.started != started) or found.state in "ZX":
        return Process(GONE, started, 0.0)
    trains = _read(Path(f"/proc/{pid}/task/{thread or pid}/stat"))
    return Process(trains.state, found.started, trains.cpu_s) if trains else found


def children_cpu_s(pid: int) -> float:
    """Return the processor time of a process's children, such as the workers of its loaders."""
    found = map(_read, Path("/proc").glob("[0-9]*/stat"))
    return sum(process.cpu_s for process in found if process is not None and process.parent == pid)


def _read(path: Path) -> Process | None:
    with suppress(OSError, IndexError, ValueError):
        # The state follows the name, which is in parentheses and may hold some itself: "12 (python) S 1 …".
        fields = path.read_text(errors="replace").rpartition(") ")[2].split()
        cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_S
        return Process(fields[0], int(fields[19]), cpu_s, parent=int(fields[1]))
    return None


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
    return [Frame(one["path"], int(one["line"]), one["name"]) for one in _FRAME.finditer(stacks)]


def main_frames(stacks: str, thread: int) -> list[Frame]:
    """Return the frames of the main thread, the innermost first, without those that only note what it does.

    Args:
        stacks: as faulthandler writes them.
        thread: the main thread's ident.
    """
    for part in re.split(r"\n\s*\n", stacks):
        if re.match(rf"\s*(?:Current thread|Thread) 0x0*{thread:x} ", part):
            return [frame for frame in all_frames(part) if not frame.path.endswith("/trainer/watch/marks.py")]
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
    return bool(frames) and frames[0].path.endswith("/torch/autograd/graph.py")

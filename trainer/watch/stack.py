"""What a rank's Python stack tells: the collective that the rank waits in, and where the user's own code is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple


class Frame(NamedTuple):
    """A function that is being called. A stack has the innermost first."""

    path: str
    line: int
    name: str

    def __str__(self) -> str:
        return f'File "{self.path}", line {self.line}, in {self.name}'


_WRITTEN = re.compile(r'  File "(?P<path>.*)", line (?P<line>\d+) in (?P<name>.*)')
"""A frame, as faulthandler writes it."""
_LIBRARY = f"{Path(__file__).resolve().parents[1]}/"
_NOT_THE_USERS = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", _LIBRARY)
_BACKWARD = re.compile(r"/torch/autograd/graph\.py$")
_DDP = re.compile(r"/torch/nn/parallel/distributed\.py$")
_FULLY_SHARD = re.compile(r"/torch/distributed/fsdp/")
_TORCH = re.compile(r"/torch/distributed/(?!c10d_logger\.py$)")  # whose decorator is around most functions
_HOROVOD = re.compile(r"/horovod/torch/")
# In the innermost line of a rank that waits. Other files of torch.distributed compute and write as well.
_WAITS = re.compile(
    rf"{_DDP.pattern}|{_BACKWARD.pattern}|{_FULLY_SHARD.pattern}|{_HOROVOD.pattern}"
    r"|/torch/distributed/(distributed_c10d|_functional_collectives)\.py$"
)
# A differentiable collective calls itself through autograd.
_LIBRARIES = re.compile(rf"{_DDP.pattern}|/torch/distributed/|{_HOROVOD.pattern}|/torch/autograd/function\.py$")


def main_frames(stacks: str, thread: int) -> list[Frame]:
    """Return the frames of one thread, the innermost first, without those of the heartbeat.

    Args:
        stacks: as faulthandler writes them.
        thread: its ident.
    """
    for part in re.split(r"\n\s*\n", stacks):
        if re.match(rf"\s*(?:Current thread|Thread) 0x0*{thread:x} ", part):
            frames = [Frame(line["path"], int(line["line"]), line["name"]) for line in _WRITTEN.finditer(part)]
            return [frame for frame in frames if not frame.path.endswith("/trainer/watch/heartbeat.py")]
    return []


def is_users(frame: str) -> bool:
    """Return whether a frame, as it is printed, is of the user's own files."""
    return not any(part in frame for part in _NOT_THE_USERS)


def place_of(frames: Sequence[Frame]) -> str:
    """Return where the user's own code is, such as "train.py:31"; "" where none is known."""
    return next((f"{Path(frame.path).name}:{frame.line}" for frame in frames if is_users(str(frame))), "")


def is_in_backward(stack: Sequence[Frame]) -> bool:
    """Return whether autograd was called last: it computes, or waits for its threads, one for each GPU."""
    return bool(stack) and bool(_BACKWARD.search(stack[0].path))


def collective_of(stack: Sequence[Frame]) -> str:
    """Return the name of the collective that a rank with this stack waits in; "" where it waits in none.

    It is the outermost function of the collective's library, which is the one that the user has called.
    """
    # A file that is being imported waits in nothing: torch.optim imports fully_shard's with the first optimizer.
    if not stack or stack[0].name == "<module>" or not _WAITS.search(stack[0].path):
        return ""
    inner = list(takewhile(lambda frame: _LIBRARIES.search(frame.path), stack))
    if has_called(_DDP, inner):
        is_forward = any(frame.name == "forward" for frame in inner)
        return "DDP's forward pass" if is_forward else "gradients"
    if has_called(_FULLY_SHARD, inner):
        return "gradients" if has_called(_BACKWARD, stack) else "fully_shard's forward pass"
    for library, pattern in (("horovod.torch", _HOROVOD), ("torch.distributed", _TORCH)):
        if names := [frame.name for frame in inner if pattern.search(frame.path)]:
            return f"{library}.{names[-1]}"
    return "gradients"


def has_called(files: re.Pattern[str], stack: Sequence[Frame]) -> bool:
    """Return whether a function of one of these files is in a stack."""
    return any(files.search(frame.path) for frame in stack)

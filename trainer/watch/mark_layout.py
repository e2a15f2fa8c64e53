"""What a record of marks holds, and where: written by a rank (`marks.py`), read by the watcher of its host."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

SIZE = 1024
"""Bytes of a record."""
ENDED = "ended"
"""Phase of a rank whose script has ended."""
BATCH_NORM = "BatchNorm's statistics"
"""What a rank waits for whose BatchNorm is over the global batch."""
MAGIC = b"trnmarks"
HEAD = struct.Struct("<8sqqq")  # magic, process, rank, ident of the main thread
# State, collectives, events, elements, what is waited for, whether it is counted; the last collective; failures.
STATE = struct.Struct("<qqqq48s?q48sq")
COUNTS = struct.Struct("<qq")  # steps of optimizers; updates
PROGRESS = struct.Struct("<q")
AT_STATE = HEAD.size
AT_EVENTS = AT_STATE + 16
AT_COUNTS = AT_STATE + STATE.size
AT_PROGRESS = AT_COUNTS + COUNTS.size
PHASE_BYTES, AT_PHASE = 24, AT_PROGRESS + PROGRESS.size
AT_FOLDER = AT_PHASE + PHASE_BYTES
# When it was read, enqueued, completed; number, elements, steps before, name and group of the first one that waits.
RECORDED = struct.Struct("<dqqqqq24s24s")
AT_RECORDED = SIZE - RECORDED.size


class State(IntEnum):
    """What a rank does."""

    BETWEEN = 0
    """It computes, between two collectives."""
    WAITING = 1
    """It has called a collective, which has not returned."""
    LOADER = 2
    """It waits for its data."""
    FAILED = 3
    """The collective that it had called has ended with an error."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What PyTorch's flight recorder says of this rank's collectives, those of all process groups together."""

    read_at: float = 0.0
    """Seconds of the monotonic clock; 0 where no recorder is read. Who holds the interpreter's lock keeps it old."""
    enqueued: int = 0
    completed: int = 0
    number: int = 0
    """In its process group, of the first collective that is not completed."""
    elements: int = 0
    steps: int = 0
    """Steps of optimizers before it."""
    what: str = ""
    """"gradients", "all_reduce", …; empty where none is known that is not completed."""
    group: str = ""
    """The process group, such as "NCCL 0"."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """What a record says."""

    pid: int
    rank: int
    thread: int
    """Python's ident of the main thread, which stacks name."""
    state: State
    collectives: int
    """Those that have returned, without those of the gradients."""
    events: int
    """Grows with every change."""
    elements: int
    """Of the tensor that is all-reduced; 0 where it does not matter."""
    what: str
    """What is waited for: "gradients", "all_reduce", …"""
    is_counted: bool
    """Whether that is one of the collectives that are counted."""
    steps: int
    """Steps of optimizers."""
    updates: int
    progress: int
    """Grows with pieces of long work that are done, such as chunks of a checkpoint."""
    phase: str
    last: str
    """Which collective has returned last, of those that are counted."""
    last_elements: int
    failures: int
    """Collectives that have ended with an error."""
    folder: str
    """Of the run's record; empty without one."""
    recorded: Recorded


def read_mark(record: bytes) -> Mark | None:
    """Return what a record says; None for anything else."""
    if len(record) != SIZE or not record.startswith(MAGIC):
        return None
    _, pid, rank, thread = HEAD.unpack_from(record)
    state, collectives, events, elements, what, is_counted, *rest = STATE.unpack_from(record, AT_STATE)
    last_elements, last, failures = rest
    steps, updates = COUNTS.unpack_from(record, AT_COUNTS)
    (pieces,) = PROGRESS.unpack_from(record, AT_PROGRESS)
    return Mark(
        pid=pid, rank=rank, thread=thread, state=State(state), collectives=collectives, events=events,
        elements=elements, what=_text(what), is_counted=is_counted, steps=steps, updates=updates, progress=pieces,
        phase=_text(record[AT_PHASE:AT_FOLDER]), last=_text(last), last_elements=last_elements, failures=failures,
        folder=_text(record[AT_FOLDER:AT_RECORDED]), recorded=_recorded(record),
    )  # fmt: skip


def _recorded(record: bytes) -> Recorded:
    read_at, enqueued, completed, number, elements, steps, what, group = RECORDED.unpack_from(record, AT_RECORDED)
    return Recorded(
        read_at=read_at, enqueued=enqueued, completed=completed, number=number, elements=elements, steps=steps,
        what=_text(what), group=_text(group),
    )  # fmt: skip


def _text(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode(errors="replace")

"""PyTorch's flight recorder: how many collectives a rank has enqueued, and how many of them are completed.

Over NCCL a rank waits for the device, wherever that is in its program. A thread reads the recorder, and writes what it
says into this rank's heartbeat, so that nothing has to be asked of a rank that hangs. It cannot read while another
thread holds the interpreter's lock; what stands there is then old, and does not count.
"""

from __future__ import annotations

import atexit
import importlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from trainer.cluster.environment import FLIGHT_RECORDER
from trainer.cluster.output import warn
from trainer.watch.heartbeat import note

_READ_S = 0.25
_SETTLED = 8
"""After so many equal readings the entries are read: 2,000 take 40 ms of the interpreter's lock, and counts 10 µs."""
_SAME_LENGTH = (":all_reduce", ":broadcast", ":reduce", ":_all_gather_base", ":_reduce_scatter_base")
"""Ends of the names of collectives in which the tensors of all ranks have the same length."""
_ENDED_S = 1.0

Recorder = Callable[[bool], bytes]
"""Returns the recorder's JSON: counts of each process group, and the latest collectives if its argument says so."""

_readers: list[threading.Thread] = []
_has_ended = threading.Event()


def find_recorder(*, is_over_nccl: bool, environ: Mapping[str, str] = os.environ) -> Recorder | None:
    """Return the recorder of torch.distributed's collectives; None where it is not needed to see that a rank waits."""
    setting = environ.get(FLIGHT_RECORDER, "")
    if setting == "0" or not (is_over_nccl or setting == "1"):
        return None
    with suppress(ImportError):
        c10d = importlib.import_module("torch._C._distributed_c10d")
        return getattr(c10d, "_dump_nccl_trace_json" if is_over_nccl else "_dump_fr_trace_json", None)
    return None


def counted(trace: Any) -> dict[str, Any]:
    """Return what the recorder says, as fields of the heartbeat.

    Raises:
        LookupError, TypeError, ValueError: it has another format.
    """
    enqueued = completed = 0
    pending = ""
    for group, status in trace["pg_status"].items():
        # The numbers of the last ones, from 1 on; -1 is none.
        begun, done = (max(0, int(status[f"last_{what}_collective"])) for what in ("enqueued", "completed"))
        enqueued, completed = enqueued + begun, completed + done
        if begun > done and not pending:
            pending = f"collective {done + 1} of process group {group}"
    return {"enqueued": enqueued, "completed": completed, "pending": pending}


def named(trace: Any, pending: str) -> str:
    """Return the pending collective with its name and length, by which ranks may differ.

    Raises:
        LookupError, TypeError, ValueError: the recorder has another format.
    """
    for entry in trace["entries"]:
        number = f"collective {entry['collective_seq_id']} of process group {entry['pg_id']}"
        if number == pending and not entry["is_p2p"]:
            elements = sum(math.prod(map(int, shape)) for shape in entry["input_sizes"])
            name = str(entry["profiling_name"])
            return f"{number}: {name}{f' of {elements:,} elements' if name.endswith(_SAME_LENGTH) else ''}"
    return pending


def follow(recorder: Recorder, *, is_root: bool) -> None:
    """Read the recorder from now on, four times a second, until this process ends."""
    reader = threading.Thread(target=_follow, args=(recorder, is_root), name="trainer-recorder", daemon=True)
    _readers.append(reader)
    reader.start()


def _follow(recorder: Recorder, is_root: bool) -> None:
    before, equal = {}, 0
    try:
        while not _has_ended.wait(_READ_S):
            now = time.monotonic()  # before the reading: what was read is at least as new
            counts = counted(json.loads(recorder(False)))
            before, equal = counts, equal + 1 if counts == before else 0
            if equal == 0:
                note(**counts)
            elif equal == _SETTLED and counts["pending"]:
                note(pending=named(json.loads(recorder(True)), counts["pending"]))
            note(read_at=now)
    except Exception as error:  # another format, say; the watch goes on without it
        note(read_at=0.0)
        if is_root:
            warn(f"PyTorch's flight recorder is not read: {type(error).__name__}: {error}")


# Exit handlers run in the reverse order: this one after those that wait for other ranks, which is to be seen.
@atexit.register
def _end_all() -> None:
    # A thread that is in PyTorch's code while Python shuts down may abort the process.
    _has_ended.set()
    for reader in _readers:
        reader.join(_ENDED_S)

"""PyTorch's flight recorder: which collectives a rank has enqueued that are not completed.

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
from trainer.watch.heartbeat import Recorded, note_recorded, steps_before

_READ_S = 0.25
_SETTLED_S = 2.0
"""After this long without change the entries are read: 2,000 take 40 ms of the interpreter's lock, and counts 10 µs."""
_ENDED_S = 1.0
_NAMES = {
    "_all_gather_base": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "allreduce_coalesced": "all_reduce",
    "all_reduce_barrier": "barrier",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
}
_BACKENDS = {"nccl": "NCCL", "gloo": "Gloo"}
_SAME_LENGTH = ("all_reduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base")
"""Collectives in which the tensors of all ranks have the same length."""
_BACKWARD_THREADS = "pt_autograd_"
"""Names of autograd's threads, one for each GPU, begin with this. What they send belongs to a backward pass."""


Recorder = Callable[[bool], bytes]
"""Returns the recorder's JSON: counts of each process group, and the latest collectives if its argument says so."""


def find_recorder(*, is_over_nccl: bool, environ: Mapping[str, str] = os.environ) -> Recorder | None:
    """Return the recorder of torch.distributed's collectives; None where it is not needed to see that a rank waits."""
    setting = environ.get(FLIGHT_RECORDER, "")
    if setting == "0" or not (is_over_nccl or setting == "1"):
        return None
    with suppress(ImportError):
        c10d = importlib.import_module("torch._C._distributed_c10d")
        return getattr(c10d, "_dump_nccl_trace_json" if is_over_nccl else "_dump_fr_trace_json", None)
    return None


def counts_of(trace: Any) -> dict[str, tuple[int, int]]:
    """Return how many collectives were enqueued, and how many are completed, by process group.

    Raises:
        LookupError, TypeError, ValueError: it has another format.
    """
    counts = {}
    for group, status in trace["pg_status"].items():
        # Their numbers, from 1 on; -1 is none.
        last = (int(status["last_enqueued_collective"]), int(status["last_completed_collective"]))
        counts[group] = (max(0, last[0]), max(0, last[1]))
    return counts


def first_that_waits(trace: Any) -> dict[str, Any]:
    """Return number, name and so on of the first collective that is not completed; {} without one.

    Raises:
        LookupError, TypeError, ValueError: it has another format.
    """
    entries = sorted(trace.get("entries", ()), key=lambda entry: int(entry["record_id"]))
    completed: dict[str, int] = {}
    for entry in entries:
        if _is_completed(entry) and not entry["is_p2p"]:
            completed[str(entry["pg_id"])] = int(entry["collective_seq_id"])
    for entry in entries:
        is_p2p, number = bool(entry["is_p2p"]), int(entry["collective_seq_id"])
        # Of a coalesced collective only the last entry is marked. A group's collectives are completed in their order.
        if _is_completed(entry) or (not is_p2p and number <= completed.get(str(entry["pg_id"]), 0)):
            continue
        backend, _, name = str(entry["profiling_name"]).rpartition(":")
        is_gradient = str(entry.get("thread_name", "")).startswith(_BACKWARD_THREADS)
        group = f"{_BACKENDS.get(backend, backend)} {entry['process_group'][0]}"
        elements = sum(math.prod(map(int, shape)) for shape in entry["input_sizes"])
        return {
            "number": int(entry["p2p_seq_id"]) if is_p2p else number,
            "pending_elements": elements * (name in _SAME_LENGTH),
            "steps_before": steps_before(int(entry["time_created_ns"])),
            "pending": "gradients" if is_gradient else _NAMES.get(name, name),
            # Messages between two ranks do not compare with what all of a group take part in.
            "group": f"{group}, {name}" if is_p2p else group,
        }
    return {}


def _is_completed(entry: Mapping[str, Any]) -> bool:
    return bool(entry["retired"]) or entry["state"] == "completed"


class Reader(threading.Thread):
    """Reads the recorder four times a second, and writes what it says into this rank's heartbeat."""

    def __init__(self, recorder: Recorder, *, is_root: bool) -> None:
        super().__init__(name="trainer-recorder", daemon=True)
        self._recorder, self._is_root = recorder, is_root
        self._ended = threading.Event()
        self._counts: dict[str, tuple[int, int]] = {}
        self._since = 0.0
        self._first: dict[str, Any] | None = None

    def run(self) -> None:
        try:
            while not self._ended.wait(_READ_S):
                self.read(time.monotonic())
        except Exception as error:  # another format, say; the watch goes on without it
            note_recorded(Recorded())
            if self._is_root:
                warn(f"PyTorch's flight recorder is not read: {type(error).__name__}: {error}")

    def read(self, now: float) -> None:
        """Write what the recorder says now."""
        counts = counts_of(json.loads(self._recorder(False)))
        if counts != self._counts:
            self._counts, self._since, self._first = counts, now, None
        # Also where all that is counted is completed: a collective is counted when its call has returned, and recorded
        # when it begins.
        if counts and self._first is None and now - self._since >= _SETTLED_S:
            self._first = first_that_waits(json.loads(self._recorder(True)))
        enqueued, completed = (sum(numbers) for numbers in zip(*counts.values(), strict=True)) if counts else (0, 0)
        # With the time before the reading: what was read is at least as new.
        note_recorded(Recorded(read_at=now, enqueued=enqueued, completed=completed, **(self._first or {})))

    def end(self) -> None:
        """Stop reading, unless that takes too long."""
        self._ended.set()
        self.join(_ENDED_S)


_readers: list[Reader] = []


def follow(recorder: Recorder, *, is_root: bool) -> None:
    """Read the recorder from now on, until this process ends."""
    reader = Reader(recorder, is_root=is_root)
    _readers.append(reader)
    reader.start()


# Exit handlers run in the reverse order: this one after those that wait for other ranks, which is to be seen.
@atexit.register
def _end_all() -> None:
    # A thread that is in PyTorch's code while Python shuts down may abort the process.
    for reader in _readers:
        reader.end()

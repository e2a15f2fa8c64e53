"""PyTorch's flight recorder: what is read of a recorded sample, when, and what it says in the heartbeat."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.ops.watcher import ranks as ranks_module
from trainer.ops.watcher.job import WORKS, View
from trainer.ops.watcher.ranks import LocalRank
from trainer.watch import heartbeat
from trainer.watch import recorder as recorder_module
from trainer.watch.heartbeat import SIZE, Heartbeat, Recorded, State
from trainer.watch.recorder import Reader, counts_of, find_recorder, first_that_waits
from trainer.watch.stack import Frame

# Of rank 0 of two over Gloo (PyTorch 2.14.1), which has begun all_reduce 6 and broadcast 7, and rank 1 has not.
SAMPLE: dict[str, Any] = json.loads(Path(__file__).with_name("flight_recorder.json").read_text())


def sample(**last: Any) -> dict[str, Any]:
    """Return the sample, with facts of the first collective that is not completed changed."""
    trace = copy.deepcopy(SAMPLE)
    trace["entries"][2].update(last)
    return trace


class Told:
    """A recorder that says what it is told."""

    def __init__(self) -> None:
        self.trace, self.asked = sample(), list[bool]()

    def __call__(self, with_entries: bool) -> bytes:
        self.asked.append(with_entries)
        trace = self.trace if with_entries else {**self.trace, "entries": []}
        return json.dumps(trace).encode()

    def complete(self) -> None:
        self.trace = sample(retired=True)
        self.trace["pg_status"]["0"]["last_completed_collective"] = "6"


@pytest.fixture
def record() -> Iterator[int]:
    path = heartbeat.open_record(0)
    assert path is not None
    yield int(path.name)
    heartbeat.close_record()


def noted(record: int) -> Recorded:
    heartbeat = Heartbeat.from_bytes(os.pread(record, SIZE, 0))
    assert heartbeat is not None
    return Recorded.from_buffer_copy(heartbeat.recorded)


def test_the_first_collective_that_is_not_completed_is_found() -> None:
    assert counts_of(SAMPLE) == {"0": (7, 5)}
    assert first_that_waits(SAMPLE) == {
        "number": 6,
        "pending_elements": 7,
        "steps_before": 0,
        "pending": "all_reduce",
        "group": "Gloo 0",
    }


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        ({"profiling_name": "nccl:all_reduce"}, {"group": "NCCL 0"}),
        ({"profiling_name": "nccl:_all_gather_base"}, {"pending": "all_gather", "pending_elements": 7}),
        ({"profiling_name": "nccl:all_reduce_barrier"}, {"pending": "barrier", "pending_elements": 0}),
        (
            {"profiling_name": "nccl:all_to_all"},
            {"pending": "all_to_all", "pending_elements": 0},
        ),  # ranks' lengths may differ
        ({"thread_name": "pt_autograd_0"}, {"pending": "gradients", "pending_elements": 7}),
        ({"input_sizes": [[2, 3], [5]]}, {"pending_elements": 11}),
        ({"retired": True}, {"number": 7, "pending": "broadcast", "pending_elements": 6}),
        ({"state": "completed"}, {"number": 7}),  # as its events on the GPU say before the watchdog does
        ({"is_p2p": True, "p2p_seq_id": 3}, {"number": 3, "group": "Gloo 0, all_reduce"}),
    ],
)
def test_a_collective_is_called_as_the_user_knows_it(facts: dict[str, Any], found: dict[str, Any]) -> None:
    told = first_that_waits(sample(**facts))
    assert {name: told[name] for name in found} == found


def test_where_all_are_completed_none_is_found() -> None:
    trace = sample(retired=True)
    trace["entries"][3]["retired"] = True
    assert first_that_waits(trace) == {}
    assert first_that_waits({"pg_status": {}}) == counts_of({"pg_status": {}}) == {}
    none = {"0": {"last_enqueued_collective": "-1", "last_completed_collective": "-1"}}
    assert counts_of({"pg_status": none}) == {"0": (0, 0)}


def test_what_was_begun_before_a_completed_collective_is_completed() -> None:
    trace = sample()
    trace["entries"][3]["retired"] = True
    assert first_that_waits(trace) == {}  # 6 is a part of something, say, of which only the end is marked
    trace["entries"][2]["pg_id"] = 1
    assert first_that_waits(trace)["number"] == 6  # of another group
    trace = sample()
    trace["entries"][3].update(retired=True, is_p2p=True)
    assert first_that_waits(trace)["number"] == 6


def test_a_collective_belongs_to_the_step_in_which_it_was_enqueued(record: int) -> None:
    times = []
    for _ in range(3):
        times.append(time.time_ns())
        heartbeat.note_step()
    assert [first_that_waits(sample(time_created_ns=at))["steps_before"] for at in (*times, time.time_ns())] == [
        0,
        1,
        2,
        3,
    ]


def test_the_entries_are_read_once_nothing_has_changed_for_a_while(record: int) -> None:
    told = Told()
    reader = Reader(told, is_root=True)
    reader.read(100.0)
    assert bytes(noted(record)) == bytes(Recorded(read_at=100.0, enqueued=7, completed=5))
    reader.read(101.5)
    assert told.asked == [False, False]
    for now in (102.0, 102.5, 103.0):
        reader.read(now)
    assert told.asked.count(True) == 1
    waits = Recorded(
        read_at=103.0, enqueued=7, completed=5, number=6, pending_elements=7, pending="all_reduce", group="Gloo 0"
    )
    assert bytes(noted(record)) == bytes(waits)
    told.complete()
    reader.read(104.0)
    assert bytes(noted(record)) == bytes(Recorded(read_at=104.0, enqueued=7, completed=6))
    reader.read(106.0)
    assert noted(record).number == 7


def test_where_nothing_waits_the_entries_are_read_once(record: int) -> None:
    told = Told()
    told.trace = sample(retired=True)
    told.trace["entries"][3]["retired"] = True
    told.trace["pg_status"]["0"]["last_completed_collective"] = "7"
    reader = Reader(told, is_root=True)
    for now in (100.0, 110.0, 120.0):
        reader.read(now)
    assert told.asked.count(True) == 1
    assert bytes(noted(record)) == bytes(Recorded(read_at=120.0, enqueued=7, completed=7))


def test_a_collective_whose_call_has_not_returned_is_found_before_it_is_counted(record: int) -> None:
    told = Told()
    told.trace["pg_status"]["0"]["last_enqueued_collective"] = "5"
    reader = Reader(told, is_root=True)
    for now in (100.0, 103.0):
        reader.read(now)
    assert noted(record).number == 6


def test_a_watcher_never_sees_a_record_that_is_half_written(record: int) -> None:
    """Zeros in between would be progress."""
    values = Recorded(
        read_at=1.0, enqueued=7, completed=5, number=6, pending_elements=7, pending="all_reduce", group="NCCL 0"
    )
    heartbeat.note_recorded(values)
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            heartbeat.note_recorded(values)

    writer = threading.Thread(target=write)
    writer.start()
    command = [sys.executable, "-c", _READS, str(record), str(SIZE), str(Heartbeat.recorded.offset)]
    child = subprocess.run(command, pass_fds=[record], capture_output=True, text=True, timeout=30, check=False)
    ended.set()
    writer.join()
    assert (child.returncode, child.stdout.strip()) == (0, "1"), child.stderr


_READS = """
import mmap, sys
record = mmap.mmap(int(sys.argv[1]), int(sys.argv[2]), prot=mmap.PROT_READ)
print(len({record[int(sys.argv[3]):] for _ in range(100_000)}))
"""


@pytest.mark.parametrize(("is_root", "lines"), [(True, 1), (False, 0)])
def test_a_recorder_with_another_format_is_said_once_and_ends_nothing(
    record: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], is_root: bool, lines: int
) -> None:
    monkeypatch.setattr(recorder_module, "_READ_S", 0.01)
    told = Told()
    del told.trace["pg_status"]
    reader = Reader(told, is_root=is_root)
    reader.start()
    reader.join(5.0)
    assert not reader.is_alive()
    assert len(told.asked) == 1
    assert bytes(noted(record)) == bytes(Recorded())
    assert capfd.readouterr().err.count("flight recorder is not read: KeyError: 'pg_status'") == lines


def test_a_reader_ends_when_it_is_told_to(record: int) -> None:
    reader = Reader(Told(), is_root=True)
    reader.start()
    reader.end()
    assert not reader.is_alive()


def test_the_recorder_is_read_over_nccl_only_unless_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    c10d: Any = torch._C._distributed_c10d
    assert find_recorder(is_over_nccl=False, environ={}) is None
    assert find_recorder(is_over_nccl=False, environ={"TRAINER_FLIGHT_RECORDER": "1"}) is c10d._dump_fr_trace_json
    assert find_recorder(is_over_nccl=True, environ={"TRAINER_FLIGHT_RECORDER": "0"}) is None
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", Told(), raising=False)
    assert find_recorder(is_over_nccl=True, environ={}) is c10d._dump_nccl_trace_json
    monkeypatch.delattr(c10d, "_dump_nccl_trace_json")
    assert find_recorder(is_over_nccl=True, environ={}) is None


class Looked:
    """This process as rank 0, with a stack of its choice."""

    def __init__(self, record: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank = LocalRank(0, f"/proc/{os.getpid()}/fd/{record}")
        self.frames: list[Frame] = []
        monkeypatch.setattr(ranks_module, "main_frames", lambda *_: self.frames)

    def seen(self) -> View:
        return self.rank.with_stacks(0, children_work=False)


@pytest.fixture
def looked(record: int, monkeypatch: pytest.MonkeyPatch) -> Looked:
    return Looked(record, monkeypatch)


def waits(**facts: Any) -> Recorded:
    known = {"read_at": time.monotonic(), "enqueued": 7, "completed": 5, "number": 6, "pending_elements": 7}
    return Recorded(**{**known, "pending": "all_reduce", "group": "NCCL 0", "steps_before": 3, **facts})


@pytest.mark.parametrize("state", [State.BETWEEN, State.LOADER, State.WAITING])
def test_a_rank_whose_collective_is_not_completed_waits_in_it(looked: Looked, state: int) -> None:
    assert heartbeat._record is not None
    heartbeat._record.set(int(state), b"something", 0)
    heartbeat.note_recorded(waits())
    view = looked.seen()
    assert (view.waits, view.what, view.elements) == (True, "all_reduce", 7)
    assert (view.group, view.number, view.steps_before, view.steps) == ("NCCL 0", 6, 3, 0)


def test_a_rank_that_has_failed_has_failed(looked: Looked) -> None:
    assert heartbeat._record is not None
    heartbeat._record.fail(b"all_reduce")
    heartbeat.note_recorded(waits())
    assert looked.seen().state == State.FAILED


@pytest.mark.parametrize(
    "facts",
    [
        {"read_at": time.monotonic() - 3.0},  # since then another thread may hold the interpreter's lock
        {"pending": "", "completed": 7},
        {"read_at": 0.0},
    ],
)
def test_what_is_old_or_completed_makes_nobody_wait(looked: Looked, facts: dict[str, Any]) -> None:
    heartbeat.note_recorded(waits(**facts))
    view = looked.seen()
    assert (view.waits, view.is_recorded) == (False, False)


def test_in_a_backward_pass_nobody_waits_for_others_where_all_collectives_are_completed(looked: Looked) -> None:
    looked.frames = [Frame("/x/site-packages/torch/autograd/graph.py", 1, "run")]
    heartbeat.note_recorded(waits(pending="", completed=7))
    view = looked.seen()
    assert (view.waits, view.excuse) == (False, WORKS)  # its GPU's threads of autograd may be at work
    heartbeat.note_recorded(waits(pending="", completed=7, read_at=time.monotonic() - 3.0))
    assert looked.seen().what == "gradients"  # as without a recorder
    heartbeat.note_recorded(Recorded())
    assert looked.seen().what == "gradients"


def test_collectives_that_are_completed_are_progress(looked: Looked) -> None:
    before = looked.rank.view()
    heartbeat.note_recorded(waits())
    after = looked.rank.view()
    assert after.changed_since(before)
    heartbeat.note_recorded(waits())  # read again
    assert not looked.rank.view().changed_since(after)
    assert not looked.seen().changed_since(after)  # nor does a look make any

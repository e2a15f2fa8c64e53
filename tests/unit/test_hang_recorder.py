"""PyTorch's flight recorder: what is read of a recorded sample, and what is noted of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainer.watch import heartbeat
from trainer.watch import recorder as recorder_module
from trainer.watch.heartbeat import SIZE, Heartbeat
from trainer.watch.recorder import counted, find_recorder, follow

# Of rank 0 of two over Gloo (PyTorch 2.14.1), which has begun all_reduce 6 and broadcast 7, and rank 1 has not.
SAMPLE: dict[str, Any] = json.loads(Path(__file__).with_name("flight_recorder.json").read_text())


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(recorder_module, "_READ_S", 0.01)
    monkeypatch.setattr(recorder_module, "_readers", [])
    path = heartbeat.open_record(0)
    assert path is not None
    yield int(path.name)
    recorder_module._end_all()
    assert not any(reader.is_alive() for reader in recorder_module._readers)
    recorder_module._has_ended.clear()
    heartbeat._forget()


def noted(record: int) -> Heartbeat:
    heartbeat = Heartbeat.from_bytes(os.pread(record, SIZE, 0))
    assert heartbeat is not None
    return heartbeat


@pytest.mark.parametrize(
    ("groups", "found"),
    [
        ({"0": ("7", "5")}, (7, 5, "collective 6 of process group 0")),
        ({"0": ("7", "7"), "4": ("3", "2")}, (10, 9, "collective 3 of process group 4")),
        ({"0": ("7", "7")}, (7, 7, "")),
        ({"0": ("-1", "-1")}, (0, 0, "")),
        ({}, (0, 0, "")),
    ],
)
def test_the_first_collective_that_is_not_completed_is_found(
    groups: dict[str, tuple[str, str]], found: tuple[int, int, str]
) -> None:
    status = {
        group: {"last_enqueued_collective": enqueued, "last_completed_collective": completed}
        for group, (enqueued, completed) in groups.items()
    }
    assert tuple(counted({"pg_status": status}).values()) == found


def test_the_entries_are_read_once_nothing_has_changed_for_a_while(record: int) -> None:
    asked = list[bool]()

    def recorder(with_entries: bool) -> bytes:
        asked.append(with_entries)
        return json.dumps(SAMPLE if with_entries else {"pg_status": SAMPLE["pg_status"]}).encode()

    before = time.monotonic()
    follow(recorder, is_root=True)
    while noted(record).read_at < before + 0.3:
        assert time.monotonic() < before + 5.0
    read = noted(record)
    assert (read.enqueued, read.completed) == (7, 5)
    assert read.pending == "collective 6 of process group 0: gloo:all_reduce of 7 elements"
    assert asked[:10] == [*[False] * 9, True]
    assert asked.count(True) == 1


@pytest.mark.parametrize(("is_root", "lines"), [(True, 1), (False, 0)])
def test_another_format_is_said_once_and_ends_the_reading(
    record: int, capfd: pytest.CaptureFixture[str], is_root: bool, lines: int
) -> None:
    follow(lambda with_entries: b"{}", is_root=is_root)
    (reader,) = recorder_module._readers
    reader.join(5.0)
    assert not reader.is_alive()
    assert noted(record).read_at == 0.0
    assert capfd.readouterr().err.count("flight recorder is not read: KeyError: 'pg_status'") == lines


def test_the_recorder_is_read_over_nccl_only_unless_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    c10d: Any = torch._C._distributed_c10d
    assert find_recorder(is_over_nccl=False, environ={}) is None
    assert find_recorder(is_over_nccl=False, environ={"TRAINER_FLIGHT_RECORDER": "1"}) is c10d._dump_fr_trace_json
    assert find_recorder(is_over_nccl=True, environ={"TRAINER_FLIGHT_RECORDER": "0"}) is None
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", c10d._dump_fr_trace_json, raising=dist.is_nccl_available())
    assert find_recorder(is_over_nccl=True, environ={}) is c10d._dump_nccl_trace_json
    monkeypatch.delattr(c10d, "_dump_nccl_trace_json")
    assert find_recorder(is_over_nccl=True, environ={}) is None

"""The heartbeat of a rank: what it waits for is read back from outside, and without a record nothing happens."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from trainer.watch import heartbeat
from trainer.watch.heartbeat import SIZE, Heartbeat, State, note_waits, report_phase, report_step, waits
from trainer.watch.spans import loading


@pytest.fixture
def record() -> Iterator[Path]:
    """The record of rank 2, as another process opens it."""
    path = heartbeat.open_record(2)
    assert path is not None
    yield path
    heartbeat._forget()


def read(path: Path) -> Heartbeat:
    heartbeat = Heartbeat.from_reader(path.read_bytes)
    assert heartbeat is not None
    assert heartbeat.version % 2 == 0
    return heartbeat


class Told:
    """A strategy, as far as its waits are noted."""

    def __init__(self, record: Path) -> None:
        self._record, self.seen = record, list[Heartbeat]()

    def all_reduce(self, tensor: object) -> None:
        self.seen.append(read(self._record))

    def broadcast(self, tensor: object) -> None:
        self.all_reduce(tensor)
        self.seen.append(read(self._record))


note_waits(Told, ("all_reduce", "broadcast"))


class Tensor:
    def numel(self) -> int:
        return 12


def test_a_collective_is_noted_with_its_number_and_length_until_it_returns(record: Path) -> None:
    ranks = Told(record)
    ranks.all_reduce(Tensor())
    ranks.all_reduce(Tensor())
    first, second = ranks.seen
    assert (first.rank, first.pid, first.state, first.what) == (2, os.getpid(), State.WAITING, "all_reduce")
    assert (first.elements, first.collectives, second.collectives) == (12, 0, 1)
    after = read(record)
    assert (after.state, after.what, after.collectives) == (State.BETWEEN, "", 2)
    assert (first.last, second.last, second.last_elements) == ("", "all_reduce", 12)
    assert first.events < second.events < after.events


def test_a_collective_within_another_is_a_part_of_it(record: Path) -> None:
    ranks = Told(record)
    ranks.broadcast(Tensor())
    assert [one.what for one in ranks.seen] == ["broadcast", "broadcast"]
    assert ranks.seen[0].events == 2, "a part that begins is progress"
    assert ranks.seen[1].elements == 0, "the ranks' may differ"
    assert [one.is_counted for one in ranks.seen] == [True, True]
    assert read(record).collectives == 1


def test_a_collective_that_has_failed_stays_noted_until_the_next(record: Path) -> None:
    with suppress(ValueError), waits("all_reduce", 12, counts=True):
        raise ValueError
    failed = read(record)
    assert (failed.state, failed.what, failed.elements, failed.collectives) == (State.FAILED, "all_reduce", 12, 0)
    assert (failed.last, failed.failures, failed.is_counted) == ("", 1, True)
    assert heartbeat.report_failure("HorovodInternalError", "", 2, "gradients")
    assert read(record).what == "all_reduce"
    with waits("barrier", counts=True):  # the error was caught
        assert (read(record).state, read(record).collectives) == (State.WAITING, 1)
    assert read(record).state == State.BETWEEN


def test_a_collective_that_has_failed_while_a_batch_is_drawn_stays_noted(record: Path) -> None:
    def draw() -> Iterator[int]:
        with waits("all_reduce"):
            yield [][0]

    with suppress(IndexError):
        next(iter(loading(draw())))
    assert read(record).state == State.FAILED


def test_who_is_interrupted_in_a_collective_has_not_failed_in_it(record: Path) -> None:
    with suppress(KeyboardInterrupt), waits("all_reduce"):
        raise KeyboardInterrupt
    assert read(record).state == State.BETWEEN


def test_an_error_in_a_collective_without_marks_is_noted_at_the_end(record: Path) -> None:
    assert not heartbeat.report_failure("ValueError", "", 2)
    assert read(record).state == State.BETWEEN
    assert heartbeat.report_failure("DistBackendError", "", 2, "gradients")
    assert (read(record).state, read(record).what) == (State.FAILED, "gradients")


def test_steps_updates_and_phases_come_from_what_trainer_run_is_told(record: Path) -> None:
    report_phase("training")
    report_step(1, is_new=True)
    report_step(1, is_new=False)
    found = read(record)
    assert (found.steps, found.updates, found.phase) == (2, 1, "training")
    report_phase("evaluation")
    assert read(record).phase == "evaluation"
    assert read(record).events > found.events
    heartbeat.note(folder="runs/one")
    assert read(record).folder == "runs/one"


def test_another_thread_changes_nothing_but_phase_and_pieces(record: Path) -> None:
    def work() -> None:
        with waits("broadcast"):
            pass
        report_phase("saving")
        heartbeat.progress()

    before = read(record)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    after = read(record)
    assert (after.events, after.phase, after.pieces) == (before.events, "saving", 1)


def test_a_child_writes_nothing(record: Path) -> None:
    child = os.fork()
    if child == 0:
        heartbeat.report_phase("child")
        os._exit(0)
    os.waitpid(child, 0)
    assert read(record).phase == ""


def test_without_a_record_nothing_happens() -> None:
    heartbeat.report_phase("training")
    heartbeat.progress()
    with waits("broadcast"):
        assert list(loading([1, 2])) == [1, 2]


@pytest.mark.parametrize("record", [b"", bytes(SIZE), b"trainer-heartbeat 1\n"])
def test_anything_else_is_no_heartbeat(record: bytes) -> None:
    assert Heartbeat.from_bytes(record) is None


def test_a_record_is_read_as_it_was_at_one_moment(record: Path) -> None:
    own = heartbeat._record
    assert own is not None

    def read_meanwhile() -> bytes:
        if changes:
            changes.pop()()
        return record.read_bytes()

    def begin() -> None:
        own.version |= 1
        own.steps += 1

    def end() -> None:
        own.updates += 1
        own.version += 1

    changes = [end, begin]
    read_back = Heartbeat.from_reader(read_meanwhile)
    assert read_back is not None
    assert (read_back.steps, read_back.updates) == (1, 1)
    begin()  # and is stopped there
    read_back = Heartbeat.from_reader(record.read_bytes)
    assert read_back is not None
    assert (read_back.steps, read_back.updates) == (2, 1)
    heartbeat.note(signal=15)  # a handler, within a write
    assert own.version % 2 == 1
    with waits("broadcast"):
        pass
    assert read(record).signal == 15, "what a handler's exception has left odd is even after the next change"

"""The status file of a rank: what is reported is read back, and without a job nothing happens."""

from __future__ import annotations

import os
import subprocess
import sys
import timeit
from pathlib import Path

import pytest

from trainer.cluster.environment import Launch
from trainer.watch import status
from trainer.watch.status import MISTAKE, RankStatus, UpdateCounter, folder_name, read_status


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The status file of rank 1, which has joined."""
    monkeypatch.setattr(status, "_file", None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("trainer.watch.status.atexit.register", lambda _: None)
    monkeypatch.setenv("TRAINER_JOB", "abc")
    status.report_join(Launch(rank=1, size=4))
    return tmp_path / folder_name("abc", os.geteuid()) / "rank-1"


def read(path: Path) -> RankStatus:
    found = read_status(path.read_bytes())
    assert found is not None
    return found


def test_a_rank_says_who_it_is(file: Path) -> None:
    found = read(file)
    assert (found.pid, found.rank, found.size) == (os.getpid(), 1, 4)
    assert (found.update, found.first_update, found.phase, found.error) == (0, 0, "joining", "")
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_updates_and_the_first_of_them_are_told(file: Path) -> None:
    for update in (51, 52, 53):
        status.report_update(update)
    found = read(file)
    assert (found.update, found.first_update) == (53, 51)
    assert 0 < found.first_update_s <= found.progress_s


def test_a_phase_is_progress_and_keeps_the_counters(file: Path) -> None:
    status.report_update(7)
    before = read(file)
    status.report_phase("evaluation")
    found = read(file)
    assert (found.update, found.phase, found.reports) == (7, "evaluation", 1)
    status.report_phase("evaluation")
    assert read(file).reports == 2
    status.report_update(8)
    assert read(file).reports == 0
    assert found.progress_s >= before.progress_s


def test_a_failure_keeps_the_phase_and_a_long_message_is_cut(file: Path) -> None:
    status.report_phase("saving")
    status.report_failure(MISTAKE, "é" * 1000, Launch(rank=1, size=4))
    found = read(file)
    assert (found.phase, found.error) == ("saving", MISTAKE)
    assert found.message == "é" * 256


def test_a_signal_is_kept_beside_the_longest_texts(file: Path) -> None:
    assert read(file).signal == 0
    status.report_signal(12)
    status.report_failure("x" * 80, "y" * 512, Launch(rank=1, size=4))
    found = read(file)
    assert (found.signal, found.error, found.message) == (12, "x" * 80, "y" * 512)


def test_python_s_end_is_done_unless_the_rank_was_preempted(file: Path) -> None:
    status._report_exit()
    assert read(file).phase == "done"
    status.report_end("preempted")
    status._report_exit()
    assert read(file).phase == "preempted"


def test_a_child_with_the_same_environment_leaves_the_rank_s_file_alone(file: Path) -> None:
    script = "from trainer.watch import status; from trainer.cluster.environment import Launch; "
    script += "status.report_failure('Child', 'x', Launch(rank=1, size=4))"
    environment = {**os.environ, "TMPDIR": str(file.parent.parent)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=60)
    assert read(file).error == ""


def test_without_a_job_nothing_happens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(status, "_file", None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("TRAINER_JOB", raising=False)
    status.report_join(Launch())
    status.report_update(1)
    status.report_failure("ValueError", "", Launch())
    status.report_end("done")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("record", [b"", b"\0" * status.SIZE, b"trainer-status 1 2"])
def test_what_is_no_status_is_not_read(record: bytes) -> None:
    assert read_status(record) is None


@pytest.mark.usefixtures("file")
def test_counting_an_update_costs_less_than_a_microsecond() -> None:
    # The bound leaves room for a machine that does something else as well.
    assert min(timeit.repeat(lambda: status.report_update(5), number=10_000, repeat=5)) / 10_000 < 3e-6


def test_an_update_is_a_batch_whose_optimizers_have_stepped() -> None:
    counter = UpdateCounter()
    for _ in range(3):
        counter.on_batch()
        counter.on_step(has_loader=True)
        counter.on_step(has_loader=True)
    assert counter.count == 3
    counter.on_batch()  # whose gradients are kept for the next one
    assert counter.count == 3
    counter = UpdateCounter()
    counter.on_step(has_loader=False)
    counter.on_step(has_loader=False)
    assert counter.count == 2


def test_a_hang_is_noted_in_the_file_of_another_process_and_stays(file: Path) -> None:
    status.report_phase("training")
    status.report_verdict(1, status.HANG, "1: rank 1 did not come")
    status.report_failure("lost peer", "follows from it", Launch(rank=1, size=4))
    found = read(file)
    assert (found.error, found.message, found.phase) == ("hang", "1: rank 1 did not come", "training")
    status.report_verdict(3, status.HANG, "nobody's")  # has no file


def test_that_ranks_called_different_collectives_is_noted_beside_no_error_of_a_rank_s_own(file: Path) -> None:
    launch = Launch(rank=1, size=4)
    status.report_failure("lost peer", "follows from it", launch)
    status.report_verdict(1, status.DIFFERENT, "rank 2 called another one")
    status.report_failure("lost peer", "follows from it", launch)
    assert (read(file).error, read(file).message) == ("different collectives", "rank 2 called another one")


def test_a_rank_s_own_error_stays(file: Path) -> None:
    status.report_failure("MemoryError", "", Launch(rank=1, size=4))
    status.report_verdict(1, status.DIFFERENT, "rank 2 called another one")
    assert read(file).error == "MemoryError"


@pytest.mark.parametrize("job", ["abc", None])
def test_a_hang_is_not_noted_in_a_folder_that_another_user_could_have_made(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, job: str | None
) -> None:
    folder = tmp_path / folder_name("", os.geteuid())
    folder.mkdir()
    (folder / "rank-1").write_bytes(bytes(status.SIZE))
    if job is None:
        monkeypatch.delenv("TRAINER_JOB")
    else:
        monkeypatch.setattr(status, "is_own", lambda _: False)
    status.report_verdict(1, status.HANG, "1: rank 1 did not come")
    assert (folder / "rank-1").read_bytes() == bytes(status.SIZE)
    assert read(file).error == ""

"""The heartbeat of a rank of `trainer run`: what is reported is read back, and without a job nothing happens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.watch import heartbeat, job_folder
from trainer.watch.heartbeat import MISTAKE, Heartbeat, UpdateCounter
from trainer.watch.job_folder import DIFFERENT, HANG, JobVerdict, folder_name, parse_verdict, write_verdict


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The record of rank 1, which has joined."""
    monkeypatch.setattr(heartbeat, "_record", None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("trainer.watch.heartbeat.atexit.register", lambda _: None)
    monkeypatch.setenv("TRAINER_JOB", "abc")
    heartbeat.report_join(1)
    return tmp_path / folder_name("abc", os.geteuid()) / "rank-1"


def read(path: Path) -> Heartbeat:
    record = Heartbeat.from_reader(path.read_bytes)
    assert record is not None
    return record


def test_a_rank_says_who_it_is(file: Path) -> None:
    record = read(file)
    assert (record.pid, record.rank) == (os.getpid(), 1)
    assert (record.updates, record.first_update, record.phase, record.error) == (0, 0, "joining", "")
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_updates_and_the_first_of_them_are_told(file: Path) -> None:
    for update in (51, 52, 53):
        heartbeat.report_update(update)
    record = read(file)
    assert (record.updates, record.first_update) == (53, 51)
    assert 0 < record.first_update_s <= record.progress_s


def test_a_phase_is_progress_and_keeps_the_counters(file: Path) -> None:
    heartbeat.report_update(7)
    before = read(file)
    heartbeat.report_phase("evaluation")
    record = read(file)
    assert (record.updates, record.phase, record.reports) == (7, "evaluation", 1)
    heartbeat.report_phase("evaluation")
    assert read(file).reports == 2
    heartbeat.report_update(8)
    assert read(file).reports == 0
    assert record.progress_s >= before.progress_s


def test_a_failure_keeps_the_phase_and_a_long_message_is_cut(file: Path) -> None:
    heartbeat.report_phase("saving")
    heartbeat.report_failure(MISTAKE, "é" * 1000, 1)
    record = read(file)
    assert (record.phase, record.error) == ("saving", MISTAKE)
    assert record.message == "é" * 256


def test_a_signal_is_kept_beside_the_longest_texts(file: Path) -> None:
    assert read(file).signal == 0
    heartbeat.note(signal=12)
    heartbeat.report_failure("x" * 80, "y" * 512, 1)
    record = read(file)
    assert (record.signal, record.error, record.message) == (12, "x" * 80, "y" * 512)


def test_python_s_end_is_done_unless_the_rank_was_preempted(file: Path) -> None:
    heartbeat._report_exit()
    assert read(file).phase == "done"
    heartbeat.report_phase("preempted")
    heartbeat._report_exit()
    assert read(file).phase == "preempted"


def test_a_child_with_the_same_environment_leaves_the_rank_s_file_alone(file: Path) -> None:
    script = "from trainer.watch import heartbeat; "
    script += "heartbeat.report_failure('Child', 'x', 1)"
    environment = {**os.environ, "TMPDIR": str(file.parent.parent)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=60)
    assert read(file).error == ""


def test_without_a_job_nothing_happens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(heartbeat, "_record", None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("TRAINER_JOB", raising=False)
    heartbeat.report_join(0)
    heartbeat.report_update(1)
    heartbeat.report_failure("ValueError", "", 0)
    heartbeat.report_phase("done")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("file")
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


def test_a_verdict_is_noted_in_the_job_s_folder_beside_what_the_ranks_say(file: Path) -> None:
    write_verdict(JobVerdict(DIFFERENT, "rank 2 called another one"))
    write_verdict(JobVerdict(HANG, "rank 1 did not come", (1, 3)))
    heartbeat.report_failure("lost peer", "follows from it", 1)
    line = (file.parent / "verdict.json").read_text()
    assert parse_verdict(line) == JobVerdict(HANG, "rank 1 did not come", (1, 3))
    assert line.count("\n") == 1
    assert read(file).error == "lost peer"
    assert sorted(path.name for path in file.parent.iterdir()) == ["rank-1", "sigterm-1", "verdict.json"]
    write_verdict(None)
    assert not (file.parent / "verdict.json").exists()


@pytest.mark.parametrize("line", ["", "trainer-heartbeat 1", "[]", "{}", '{"kind": "hang", "text": "", "culprits": 1}'])
def test_anything_else_is_no_verdict(line: str) -> None:
    assert parse_verdict(line) is None


@pytest.mark.parametrize("job", ["abc", None])
def test_a_verdict_is_not_noted_in_a_folder_that_another_user_could_have_made(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, job: str | None
) -> None:
    folder = tmp_path / folder_name("", os.geteuid())
    folder.mkdir()
    if job is None:
        monkeypatch.delenv("TRAINER_JOB")
    else:
        monkeypatch.setattr(job_folder, "is_ours", lambda _: False)
    write_verdict(JobVerdict(HANG, "rank 1 did not come", (1,)))
    assert not list(tmp_path.glob("*/verdict.json"))


def test_the_watcher_is_given_the_record_that_trainer_run_reads(file: Path) -> None:
    record = heartbeat.open_record(1)
    assert record is not None
    assert record.samefile(file)
    assert heartbeat.open_record(1) is None, "it is watched already"
    heartbeat.report_update(9)
    assert read(file).updates == 9

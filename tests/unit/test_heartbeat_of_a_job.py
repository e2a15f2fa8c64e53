"""The heartbeat of a rank of `trainer run`: what is reported is read back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.watch import heartbeat, job_folder
from trainer.watch.heartbeat import MISTAKE, Heartbeat, UpdateCounter
from trainer.watch.job_folder import HANG, JobVerdict, folder_name, parse_verdict, write_verdict


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


def test_a_failure_keeps_the_phase_and_a_long_message_is_cut(file: Path) -> None:
    heartbeat.report_phase("saving")
    heartbeat.report_failure(MISTAKE, "é" * 1000, 1)
    record = read(file)
    assert (record.phase, record.error) == ("saving", MISTAKE)
    assert record.message == "é" * 256


def test_a_child_with_the_same_environment_leaves_the_rank_s_file_alone(file: Path) -> None:
    script = "from trainer.watch import heartbeat; "
    script += "heartbeat.report_failure('Child', 'x', 1)"
    environment = {**os.environ, "TMPDIR": str(file.parent.parent)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=60)
    assert read(file).error == ""


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

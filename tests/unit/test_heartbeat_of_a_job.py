"""The heartbeat of a rank of `trainer run`: what is reported is read back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import trainer
from trainer.ops import verdict
from trainer.ops.verdict import HANG, JobVerdict, parse_verdict, write_verdict
from trainer.run import Run
from trainer.watch import heartbeat
from trainer.watch.heartbeat import MISTAKE, Heartbeat
from trainer.watch.job_folder import folder_name


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The record of rank 1, which has joined."""
    monkeypatch.setattr(heartbeat, "_record", None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("trainer.watch.heartbeat.atexit.register", lambda _: None)
    monkeypatch.setenv("TRAINER_JOB", "abc")
    folder = tmp_path / folder_name("abc", os.geteuid())
    folder.mkdir(mode=0o700)  # as `trainer run` does
    heartbeat.report_join(1)
    return folder / "rank-1"


def read(path: Path) -> Heartbeat:
    record = Heartbeat.from_reader(path.read_bytes)
    assert record is not None
    return record


def test_a_rank_says_who_it_is(file: Path) -> None:
    record = read(file)
    assert (record.pid, record.rank) == (os.getpid(), 1)
    assert (record.updates, record.first_update, record.phase, record.error) == (0, 0, "joining", "")
    assert file.stat().st_mode & 0o777 == 0o600


def test_without_the_folder_of_who_has_started_it_a_rank_makes_no_record(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(file.parent)
    monkeypatch.setattr(heartbeat, "_record", None)
    heartbeat.report_join(1)
    assert not file.parent.exists()


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


def train(run: Run, batches: Iterable[torch.Tensor]) -> None:
    """Train two models by an optimizer each, as in a GAN."""
    models = [torch.nn.Linear(2, 1) for _ in range(2)]
    prepared = run.prepare(*models, *(torch.optim.SGD(model.parameters(), lr=0.1) for model in models))
    for batch in batches:
        run.backward(sum(model(batch).mean() for model in prepared[:2]))
        for optimizer in prepared[2:]:
            optimizer.step()
            optimizer.zero_grad()


def test_steps_of_two_optimizers_on_a_batch_are_an_update(file: Path) -> None:
    run = trainer.init(device="cpu")
    train(run, run.loader(list(torch.randn(6, 2)), 2))
    assert (read(file).updates, read(file).steps) == (3, 6)


def test_without_a_loader_each_step_is_an_update(file: Path) -> None:
    train(trainer.init(device="cpu"), torch.randn(2, 3, 2))
    assert (read(file).updates, read(file).steps) == (4, 4)


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
        monkeypatch.setattr(verdict, "is_ours", lambda _: False)
    write_verdict(JobVerdict(HANG, "rank 1 did not come", (1,)))
    assert not list(tmp_path.glob("*/verdict.json"))

"""The record of a run: what is in its files, when they appear, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.contexts import make_context
from trainer import EpochRecord, Evaluation, FitContext, TrainerConfig, TrainerError, UpdateRecord, World
from trainer.report.run_record import RunFolder, RunRecord

FILES = ["epochs.jsonl", "settings.json", "steps.jsonl"]


def context_on(rank: int = 0, from_root: tuple[str, str] = ("", "runs/of-rank-0")) -> FitContext:
    return make_context(World(rank=rank, size=2, launcher="mpirun", host="node7"), from_root)


def epoch(number: int) -> EpochRecord:
    evaluation = Evaluation(metrics={"loss": 0.5 / number, "accuracy": 0.25 * number}, evaluated=10, samples=10)
    return EpochRecord(
        epoch=number,
        epochs=2,
        train_loss=1.0 / number,
        samples=40,
        seconds=2.0,
        learning_rate=0.1,
        updates=100 * number,
        validation=evaluation,
        world_size=2,
    )


def update(number: int) -> UpdateRecord:
    return UpdateRecord(update=number, epoch=1, samples=7 * number, loss=1.0 / number, learning_rate=0.25)


def leave_record(record: RunRecord, context: FitContext) -> None:
    epochs = [epoch(1), epoch(2)]
    record.on_fit_start(context)
    for done in epochs:
        record.on_update(context, update(done.updates))
        record.on_epoch_end(context, done)


def content(path: Path) -> Any:
    return json.loads(path.read_text())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_settings_say_what_was_run_where_and_with_which_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "2"])
    leave_record(RunRecord(tmp_path / "run"), context_on())
    settings = content(tmp_path / "run" / "settings.json")
    assert settings["command"] == ["train.py", "--epochs", "2"]
    assert settings["epochs"] == 2
    assert settings["config"] == TrainerConfig(batch_size=7).as_dict()
    assert settings["strategy"] == "Rank"
    assert settings["tuning"] == {"threads": "2 per rank"}
    assert settings["world"] == {"size": 2, "launcher": "mpirun", "device": "cpu", "host": "node7"}
    assert settings["python"] == ".".join(map(str, sys.version_info[:3]))
    assert settings["versions"]["torch"] == torch.__version__.split("+")[0]


def test_a_folder_that_holds_a_run_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    leave_record(RunRecord(tmp_path), context_on())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(TrainerError, match=f"output folder {tmp_path} already holds a run"):
        RunRecord(tmp_path).on_fit_start(context_on())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_a_folder_that_cannot_be_written_is_named_before_training(tmp_path: Path, place: str) -> None:
    # Below a regular file, where not even root can make a folder.
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainerError, match=f"output folder {tmp_path / place} cannot be written: "):
        RunRecord(tmp_path / place).on_fit_start(context_on())


def test_a_disk_that_fills_up_costs_lines_of_the_record_and_one_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where a file is as long as it may be, its writes are cut short and then fail, as on a full disk."""
    record = RunRecord(tmp_path)
    record.on_fit_start(context_on())
    for number in range(30):  # so that the file is longer than what goes to the standard error
        record.on_update(context_on(), update(number + 1))
    size = (tmp_path / "steps.jsonl").stat().st_size
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, before[1]))
    try:
        for number in (31, 32):
            record.on_update(context_on(), update(number))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert (tmp_path / "steps.jsonl").stat().st_size == size
    record.on_update(context_on(), update(33))
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(1, 31), 33]
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "WARNING" in line]
    assert f"the run's record in {tmp_path} cannot be written: No space left on device; the training goes on" in line


def test_a_full_disk_keeps_no_run_from_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def made() -> RunFolder:
        return RunFolder(World(), lambda value: value, tmp_path, {"checkpoints": "saved"})

    made()
    monkeypatch.setattr("trainer.report.run_record._append", refuse)
    assert made().path == tmp_path
    assert f"the run's record in {tmp_path} cannot be written: No space left on device" in capfd.readouterr().err


def test_auto_makes_a_folder_named_like_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/some/where/train.py"])
    records = [RunRecord("auto"), RunRecord("auto")]
    leave_record(records[0], context_on())
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("train-2")
    assert names(folder) == FILES

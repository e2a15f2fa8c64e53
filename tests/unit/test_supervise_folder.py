"""The folder of a supervised job, the events in it, and what a recovery took."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.errors import ConfigError, TrainerError
from trainer.ops.supervise.folder import Events, locked
from trainer.ops.supervise.outcome import Attempt
from trainer.ops.supervise.supervisor import recovery_of

JOB = "0123456789abcdef" * 2


def test_a_job_is_supervised_once(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "train"
    script = "import sys; from pathlib import Path; from trainer.ops.supervise.folder import locked\n"
    script += "with locked(Path(sys.argv[1]), 'b' * 32): pass"
    command = [sys.executable, "-c", script, str(folder)]
    refused = pytest.raises(ConfigError, match=f"already supervised by process {os.getpid()};")
    with locked(folder, JOB), refused, locked(folder, JOB):
        pass
    with locked(folder, JOB):
        assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode != 0
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


def test_a_file_system_without_locks_is_no_other_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path, JOB):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()} {JOB}\n"


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrainerError, match="cannot be written: Not a directory"), locked(tmp_path / "file" / "x", JOB):
        pass


def test_a_job_that_was_not_ended_is_found_again(tmp_path: Path) -> None:
    for text, found in [(f"1 {JOB}\n", JOB), (f"1 {JOB}/../x\n", ""), ("1 0\n", ""), ("\n", "")]:
        (tmp_path / "lock").write_text(text)
        with locked(tmp_path, "b" * 32) as former:
            assert former == found
    with locked(tmp_path, JOB) as former:
        assert former == "", "the last one has ended in good order"


def test_an_event_is_a_line_for_people_and_one_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = Events(tmp_path / "events.jsonl")
    events.say("start", "attempt 1", attempt=1)
    events.say("end", "done", is_silent=True)
    Events(tmp_path / "nowhere" / "events.jsonl").say("start", "attempt 2")  # a full disk ends no job
    assert capsys.readouterr().err == "trainer run: attempt 1\ntrainer run: attempt 2\n"
    entries = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(entry["event"], entry.get("attempt")) for entry in entries] == [("start", 1), ("end", None)]


def test_a_recovery_goes_from_the_last_progress_to_the_first_update() -> None:
    failed = Attempt(hosts=(), started_at=0.0, progress_at=10.0, detected_at=10.5, ended_at=12.0)
    done = Attempt(hosts=(), started_at=12.5, joined_at=15.5)
    assert recovery_of(failed, done) == {}
    done.first_update_at = 16.5
    parts = {"detected": 0.5, "ended": 1.5, "started": 0.5, "joined": 3.0, "first update": 1.0}
    assert recovery_of(failed, done) == {**parts, "total": 6.5}

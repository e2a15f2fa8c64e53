"""The folder of a supervised job, and its lock."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.errors import ConfigError, TrainerError
from trainer.ops.supervise.folder import locked

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

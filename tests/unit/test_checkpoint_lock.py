"""The lock on a folder of checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainer import TrainerError
from trainer.checkpoint.disk import lock
from trainer.checkpoint.disk.lock import lock_folder


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_FORMER_JOB_ENDS_S", 0.2)


def test_ranks_of_one_job_share_a_folder_and_one_writes(tmp_path: Path) -> None:
    first, second = (lock_folder(tmp_path / "new", "job") for _ in range(2))
    assert first is not None
    assert second is None
    first.close()


def test_another_job_is_refused_and_the_holder_named(tmp_path: Path) -> None:
    first = lock_folder(tmp_path, "job")
    assert first is not None
    with pytest.raises(TrainerError, match=f"{tmp_path} is in use by an earlier run of this script, which was not cl"):
        lock_folder(tmp_path, "other job")
    (tmp_path / ".lock").write_text('{"job": "job", "process": 12, "host": "node7"}')
    with pytest.raises(TrainerError, match=f"{tmp_path} is in use by process 12 on host node7; name another folder"):
        lock_folder(tmp_path, "other job")
    first.close()
    other = lock_folder(tmp_path, "other job")
    assert other is not None
    assert json.loads((tmp_path / ".lock").read_text())["job"] == "other job"
    other.close()


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        f"from pathlib import Path; from trainer.checkpoint.disk.lock import lock_folder; import os, signal; "
        f"lock = lock_folder(Path({str(tmp_path)!r}), 'job'); assert lock; os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    folder_lock = lock_folder(tmp_path, "another")
    assert folder_lock is not None
    folder_lock.close()


@pytest.mark.parametrize(("name", "reason"), [("file/x", "Not a directory"), ("gone", "File exists")])
def test_a_folder_that_cannot_be_made_is_one_line(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "gone").symlink_to("/scratch/job")
    with pytest.raises(TrainerError) as caught:
        lock_folder(tmp_path / name, "job")
    assert f"folder {tmp_path}/{name} cannot be written: {reason}" in str(caught.value)

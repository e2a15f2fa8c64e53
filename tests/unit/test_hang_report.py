"""What a watcher prints and writes: it comes to the user, and no failure keeps the ranks from being ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.cluster.output import say
from trainer.ops.watcher.job import Host, View
from trainer.ops.watcher.judge import Verdict
from trainer.ops.watcher.watcher import write_stacks

VERDICT = Verdict(("no progress for 31 s: rank 1 on a did not come", "what to do: look"), (1,))


def host(folder: str) -> Host:
    views = {0: View(rank=0, folder=folder, stacks="File train.py"), 1: View(rank=1, phase="saving")}
    return Host("a", views)


def test_the_stacks_are_in_the_folder_of_the_runs_record(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_stacks(VERDICT, host(str(tmp_path)), "job")
    (folder,) = tmp_path.iterdir()
    assert f"every rank's stack is in {folder}\n" in capfd.readouterr().err
    assert (folder / "verdict.txt").read_text().splitlines() == list(VERDICT.lines)
    first, stack = (folder / "rank-0.txt").read_text().split("\n\n")
    assert (first.partition(":")[0], stack) == ("rank 0 on a", "File train.py")
    assert "phase saving" in (folder / "rank-1.txt").read_text()


def test_a_link_in_the_place_of_the_stacks_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda text: "now")
    (tmp_path / "hang-now").mkdir()
    (tmp_path / "precious").write_text("text")
    for name in ("verdict.txt", "rank-0.txt", ".rank-1.txt.partial"):
        (tmp_path / "hang-now" / name).symlink_to(tmp_path / "precious")
    write_stacks(VERDICT, host(str(tmp_path)), "job")
    assert (tmp_path / "precious").read_text() == "text"
    assert not any(path.is_symlink() for path in (tmp_path / "hang-now").iterdir())


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    write_stacks(VERDICT, host(str(tmp_path / "file")), "job")
    assert capfd.readouterr().err == "trainer: hang: the ranks' stacks cannot be written: Not a directory\n"


def test_a_launcher_that_reads_no_more_keeps_no_rank_from_being_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("trainer.cluster.output.os.write", fail)
    say(["one"])

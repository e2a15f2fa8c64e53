"""The decision whether a job whose ranks have ended goes back into the queue."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.cli import main
from trainer.ops import requeue

KILLED = "srun: error: n2: task 2: Terminated"


def exited(code: int, task: str = "task 0") -> str:
    return f"srun: error: n1: {task}: Exited with exit code {code}\n{KILLED}\n"


@pytest.mark.parametrize(
    ("code", "messages", "cause", "decision"),
    [
        (0, "", "", 0),
        (0, "", "told", 0),
        (1, "", "", 1),
        (75, "", "", 75),
        (78, "", "", 78),
        (78, "", "lost", 78),
        (137, "", "", 137),
        (1, "", "told", 75),
        (140, "", "told", 75),
        (1, "", "lost", 75),
        # The rank's code, not that of those which srun kills because of it.
        (143, exited(75), "", 75),
        (143, exited(78), "", 78),
        (143, exited(78), "told", 78),
        (143, exited(3), "", 143),
        (143, exited(175), "", 143),
        # 78 would come again, even where other ranks have saved.
        (78, exited(75) + exited(78, "task 3"), "", 78),
        # A crash, of the rank that has ended first only.
        (134, "", "", 75),
        (135, "", "", 75),
        (139, "", "", 75),
        (143, exited(139, "tasks 0-1,3"), "", 75),
        (143, f"srun: error: n1: task 0: Segmentation fault\n{KILLED}\n", "", 75),
        (143, f"srun: error: n1: task 3: Bus error (core dumped)\n{KILLED}\n", "", 75),
        (143, exited(1) + "srun: error: n2: task 3: Aborted\n", "", 143),
        (139, exited(1) + "srun: error: n2: task 3: Segmentation fault\n", "", 139),
        (137, "srun: error: task 2 launch failed: Unspecified error\n", "", 75),
    ],
)
def test_what_is_decided(tmp_path: Path, code: int, messages: str, cause: str, decision: int) -> None:
    (tmp_path / "srun.log").write_text(messages)
    probe = "false" if cause == "lost" else "true"
    assert requeue.decide(code, tmp_path, cause == "told", probe) == decision


def test_a_launcher_without_messages_needs_no_file_of_them(tmp_path: Path) -> None:
    assert [requeue.decide(code, tmp_path, False, "true") for code in (75, 134, 3)] == [75, 75, 3]


def test_starts_that_have_not_saved_are_repeated_three_times_in_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = [requeue.decide(code, tmp_path, False, "false") for code in (1, 1, 75, 1, 1, 1, 1)]
    assert codes == [75, 75, 75, 75, 75, 75, 1]
    said = capsys.readouterr().out.splitlines()
    assert said[2] == "exit code 75: back into the queue"
    assert said[-1] == "exit code 1: not saved 4 times in a row"


@pytest.mark.parametrize(("code", "told"), [(0, False), (75, False), (78, False), (134, False), (1, True)])
def test_hosts_are_not_probed_where_that_would_change_nothing(tmp_path: Path, code: int, told: bool) -> None:
    requeue.decide(code, tmp_path, told, f"touch {tmp_path}/probed")
    assert not (tmp_path / "probed").exists()


@pytest.mark.parametrize(
    ("words", "decision"),
    [
        (["75"], 75),
        (["3"], 3),
        (["3", "--told"], 75),
        (["3", "--probe", "test a = a"], 3),
        (["3", "--probe", "test a = b"], 75),
        (["three"], 2),
    ],
)
def test_it_is_a_command(tmp_path: Path, words: list[str], decision: int) -> None:
    try:
        code = main(["requeue", words[0], str(tmp_path), *words[1:]])
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code == decision


def test_where_nothing_can_count_the_starts_the_job_does_not_come_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["requeue", "75", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err == f"trainer requeue: {tmp_path}/none/unsaved: No such file or directory\n"

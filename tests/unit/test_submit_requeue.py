"""The decision whether a job whose ranks have ended goes back into the queue."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.job_files import render
from trainer.ops.submit import requeue
from trainer.ops.submit.schedulers.template import read_requeue

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
    assert requeue.decide(code, tmp_path, cause.replace("lost", ""), probe) == decision


def test_a_launcher_without_messages_needs_no_file_of_them(tmp_path: Path) -> None:
    assert [requeue.decide(code, tmp_path, "", "true") for code in (75, 134, 3)] == [75, 75, 3]


def test_starts_that_have_not_saved_are_repeated_three_times_in_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = [requeue.decide(code, tmp_path, "", "false") for code in (1, 1, 75, 1, 1, 1, 1)]
    assert codes == [75, 75, 75, 75, 75, 75, 1]
    said = capsys.readouterr().out.splitlines()
    assert said[2] == "exit code 75: back into the queue"
    assert said[-1] == "exit code 1: not saved 4 times in a row"


@pytest.mark.parametrize(("code", "told"), [(0, ""), (75, ""), (78, ""), (134, ""), (1, "yes")])
def test_hosts_are_not_probed_where_that_would_change_nothing(tmp_path: Path, code: int, told: str) -> None:
    requeue.decide(code, tmp_path, told, "touch", str(tmp_path / "probed"))
    assert not (tmp_path / "probed").exists()


def test_it_is_a_command(tmp_path: Path) -> None:
    decisions = (("75", "", "true", 75), ("3", "", "true", 3), ("3", "yes", "true", 75), ("3", "", "false", 75))
    for code, told, probe, decision in decisions:
        command = [sys.executable, "-", code, str(tmp_path), told, probe]
        done = subprocess.run(command, input=read_requeue(), text=True, check=False, timeout=20)
        assert done.returncode == decision


def test_it_runs_on_a_host_with_an_old_python_and_nothing_else() -> None:
    tree = ast.parse(read_requeue(), feature_version=(3, 6))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"re", "subprocess", "sys", "pathlib"}


@pytest.mark.parametrize("scheduler", ["slurm", "gridengine"])
def test_job_files_hold_it(scheduler: str) -> None:
    script = render(scheduler, "--nodes", "2", "--ranks-per-node", "2", "--", "python", "train.py")
    _, _, rest = script.partition("<< 'REQUEUE'\n")
    assert rest.partition("REQUEUE\n")[0] == read_requeue()

"""Grid Engine's batch script and commands, with programs that stand in for mpirun and Grid Engine's."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.unit.job_files import render, stand_in
from trainer.cli import main
from trainer.errors import TrainerError
from trainer.ops.submit.schedulers import SCHEDULERS
from trainer.ops.submit.schedulers.gridengine import GridEngine

GRID_ENGINE = ["gridengine", "--nodes", "2", "--ranks-per-node", "2"]
COMMAND = ["--", "python", "train.py"]
RECORD = """\
==============================================================
hostname     {host}
jobnumber    7
taskid       {task}
failed       {failed}
exit_status  {code}                  (a signal)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a job, with programs in front of the PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trainer.ops.submit.schedulers.gridengine._ACCOUNTED_S", 0.0)
    (tmp_path / "train.py").touch()
    return tmp_path


def run(folder: Path, mpirun: str, *options: str, repeats: int = 0, qsub: str = "echo 8") -> int:
    """Return the exit code of the script on hosts a and b, of which b is lost where there is a file `lost`."""
    stand_in(folder, "mpirun", mpirun)
    stand_in(folder, "qsub", f'echo "$@" "$REPEATS_IN_A_ROW" > submitted; {qsub}')
    stand_in(folder, "qrsh", 'echo "$@" >> asked; [ ! -e lost ]')
    (folder / "hostfile").write_text("a 2 all.q@a UNDEFINED\nb 2 all.q@b UNDEFINED\n")
    env = dict(
        os.environ,
        SGE_O_PATH=os.environ["PATH"],
        PATH="/usr/bin:/bin",
        JOB_ID="7",
        SGE_TASK_ID="3",
        PE_HOSTFILE=str(folder / "hostfile"),
        REPEATS_IN_A_ROW=str(repeats),
    )
    command = ["python", "train.py", *(["{index}"] if "--array" in options else [])]
    script = render(*GRID_ENGINE, *options, "--", *command)
    return subprocess.run(["bash", "-c", script, "script"], cwd=folder, env=env, timeout=30, check=False).returncode


def submitted(folder: Path) -> str:
    path = folder / "submitted"
    return path.read_text().strip() if path.exists() else ""


def test_a_job_that_has_saved_submits_itself(folder: Path) -> None:
    assert run(folder, "exit 75", repeats=2) == 75
    assert submitted(folder) == "-terse -v REPEATS_IN_A_ROW script 0"
    assert (folder / "runs/train-7/next").read_text() == "8\n"


def test_a_job_of_an_array_submits_itself_alone(folder: Path) -> None:
    assert run(folder, "exit 75", "--array", "1-4", qsub="echo 8.3-3:1") == 75
    assert submitted(folder) == "-terse -v REPEATS_IN_A_ROW -t 3 script 0"
    assert (folder / "runs/train-7-3/next").read_text() == "8\n"


def test_a_job_that_may_not_submit_is_put_back(folder: Path) -> None:
    assert run(folder, "exit 75", qsub="exit 1") == 99
    assert not (folder / "runs/train-7/next").exists()


def test_a_failure_is_not_repeated(folder: Path) -> None:
    for code in (1, 78):
        assert run(folder, f"exit {code}", "--time", "1h") == code
    assert not submitted(folder)
    assert (folder / "asked").read_text() == "-inherit -nostdin b true\n"


@pytest.mark.parametrize("code", [134, 135, 139])
def test_a_crash_has_the_job_repeated(folder: Path, code: int) -> None:
    for options in ([], ["--time", "1h"]):
        assert run(folder, f"exit {code}", *options) == 75
        assert submitted(folder) == "-terse -v REPEATS_IN_A_ROW script 1"
        assert run(folder, f"exit {code}", *options, repeats=3) == code


def test_a_lost_host_has_the_job_repeated_three_times_in_a_row(folder: Path) -> None:
    (folder / "lost").touch()
    assert run(folder, "exit 1", "--time", "1h", repeats=2) == 75
    assert submitted(folder) == "-terse -v REPEATS_IN_A_ROW script 3"
    (folder / "submitted").unlink()
    assert run(folder, "exit 1", "--time", "1h", repeats=3) == 1
    assert not submitted(folder)


def test_ranks_that_fail_when_they_are_told_to_save_are_repeated(folder: Path) -> None:
    killed = "trap 'exit 140' USR2; while :; do sleep 0.02; done"
    assert run(folder, killed, "--time", "3s", "--grace", "2s") == 75
    assert submitted(folder) == "-terse -v REPEATS_IN_A_ROW script 1"


@pytest.mark.distributed
def test_a_rank_ends_when_what_has_started_it_was_killed(folder: Path) -> None:
    stand_in(folder, "sleep", "exec /bin/sleep 0.05")
    stand_in(folder, "python", "echo $$ > rank; exec /bin/sleep 60")
    mpirun = 'while [ "$1" != bash ]; do shift; done; "$@" & until [ -s rank ]; do sleep; done; kill -9 $$'
    assert run(folder, mpirun) == 137
    rank = Path("/proc", (folder / "rank").read_text().strip())
    deadline = time.monotonic() + 20
    while rank.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not rank.exists()


def test_what_watches_a_rank_does_not_hold_its_output(folder: Path) -> None:
    # mpirun would wait for it.
    stand_in(folder, "sleep", "exec /bin/sleep 10")
    stand_in(folder, "python", "exit 3")
    began = time.monotonic()
    assert run(folder, 'while [ "$1" != bash ]; do shift; done; "$@" | cat; exit ${PIPESTATUS[0]}') == 3
    assert time.monotonic() - began < 8


@pytest.mark.parametrize(
    ("records", "code", "words"),
    [
        ([("a", 0, 0)], 0, "ended"),
        ([("b", 0, 1), ("a", 0, 0)], 0, "ended"),  # that of the other host comes first
        ([("b", 0, 0), ("a", 0, 78)], 78, "ended (exit code 78)"),
        ([("b", 0, 0), ("a", 0, 3)], 1, "ended (exit code 3)"),
        ([("a", 25, 99), ("b", 0, 0)], 0, "ended"),  # was queued again
        ([("a", 100, 137)], 1, "ended (exit code 137)"),
        ([("a", 100, 0)], 1, "ended (failed: 100)"),
        ([("a", 0, 75)], 0, "ended (exit code 75)"),  # it is the next job's code that counts
    ],
)
def test_the_accounting_is_read(folder: Path, records: list[tuple[str, int, int]], code: int, words: str) -> None:
    stand_in(folder, "qstat", "printf 'Following jobs do not exist: \\n7\\n' >&2; exit 1")
    text = "".join(RECORD.format(host=host, task="undefined", failed=f, code=c) for host, f, c in records)
    stand_in(folder, "qacct", f"echo '{text}'")
    state = SCHEDULERS["gridengine"].state("7", {})
    assert (state.code, str(state)) == (code, words)


def test_the_accounting_is_read_once_it_is_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # That of the script's host comes last, and would be missing.
    stand_in(folder, "qstat", "echo 'Following jobs do not exist: 7' >&2; exit 1")
    stand_in(folder, "qacct", f"echo '{RECORD.format(host='b', task='undefined', failed=0, code=0)}'")
    monkeypatch.setattr("trainer.ops.submit.schedulers.gridengine._ACCOUNTED_S", 60.0)
    scheduler = GridEngine()
    assert scheduler.state("7", {}).code is None
    monkeypatch.setattr("trainer.ops.submit.schedulers.gridengine._ACCOUNTED_S", 0.0)
    assert scheduler.state("7", {}).code == 0


def test_an_arrays_jobs_are_told_apart_in_the_accounting(folder: Path) -> None:
    stand_in(folder, "qstat", "echo 'Following jobs do not exist: 7' >&2; exit 1")
    text = "".join(RECORD.format(host="a", task=task, failed=0, code=code) for task, code in ((1, 78), (2, 0)))
    stand_in(folder, "qacct", f"echo '{text}'")
    assert SCHEDULERS["gridengine"].state("7", {}).code == 78


def test_a_master_that_does_not_answer_says_nothing_of_a_job(folder: Path) -> None:
    stand_in(folder, "qstat", "echo 'error: commlib error: got select error' >&2; exit 1")
    stand_in(folder, "qacct", f"echo '{RECORD.format(host='a', task='undefined', failed=25, code=99)}'")
    with pytest.raises(TrainerError, match="commlib"):
        SCHEDULERS["gridengine"].state("7", {})


def test_a_script_is_looked_for_in_this_folder_unless_a_directive_names_another(folder: Path) -> None:
    stand_in(folder, "qsub", "echo 7")
    other = ["--", "python", "other.py"]
    assert main(["submit", *GRID_ENGINE, *other]) == 2
    assert main(["submit", *GRID_ENGINE, "--directive=-wd /elsewhere", *other]) == 0


def test_a_job_is_followed_under_its_next_id(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainer.ops.submit.submit._POLL_S", 0.01)
    stand_in(folder, "qsub", "mkdir -p runs/train-7; echo first > runs/train-7.log; echo 8 > runs/train-7/next; echo 7")
    stand_in(folder, "qstat", "echo second > runs/train-8.log; echo 'Following jobs do not exist' >&2; exit 1")
    ended = RECORD.format(host="a", task="undefined", failed=0, code="$([ $2 = 7 ] && echo 75 || echo 78)")
    stand_in(folder, "qacct", f'echo "{ended}"')
    assert main(["submit", *GRID_ENGINE, "--follow", *COMMAND]) == 78
    shown = capsys.readouterr()
    assert shown.out == "first\nsecond\n"
    assert "job 7 goes on as job 8; qdel 8 ends it" in shown.err

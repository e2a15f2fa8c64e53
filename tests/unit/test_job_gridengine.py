"""The job file for Grid Engine, run with programs that stand in for mpirun and Grid Engine's."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.job_files import JOBS, stand_in

SCRIPT = JOBS / "gridengine.sge"
KNOWN = """\
job_number:                 7
hard resource_list:         gpu=1,{limit}h_vmem=4G
parallel environment:  mpi range: 4
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a job, with programs in front of the PATH."""
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    return tmp_path


def run(
    folder: Path,
    mpirun: str,
    *,
    repeats: int = 0,
    limit: str = "",
    grace_s: int = 120,
    qresub: str = """echo 'Your job 8 ("train") has been submitted'""",
    command: tuple[str, ...] = ("python", "train.py", "a b"),
    task: str = "undefined",
) -> int:
    """Return the exit code of the script on hosts a and b, of which b is lost where there is a file `lost`."""
    stand_in(folder, "mpirun", f'printf "%s\\n" "$@" > arguments\n{mpirun}')
    stand_in(folder, "qresub", f'echo "$@" > submitted; {qresub}')
    stand_in(folder, "qrsh", 'echo "$@" >> asked; [ ! -e lost ]')
    stand_in(folder, "qstat", f"cat <<< '{KNOWN.format(limit=f'h_rt={limit},' if limit else '')}'")
    stand_in(folder, "qdel", 'echo "$@" > deleted')
    (folder / "hostfile").write_text("a 2 all.q@a UNDEFINED\nb 2 all.q@b UNDEFINED\n")
    if repeats:
        (folder / "runs/train-7").mkdir(parents=True, exist_ok=True)
        (folder / "runs/train-7/unsaved").write_text(f"{repeats}\n")
    env = dict(
        os.environ,
        SGE_O_PATH=f"{os.environ['PATH']}:/of/who/submits",
        PATH="/usr/bin:/bin",
        JOB_ID="7",
        JOB_NAME="train",
        NSLOTS="4",
        SGE_TASK_ID=task,
        GRACE_S=str(grace_s),
        PE_HOSTFILE=str(folder / "hostfile"),
    )
    return subprocess.run(["bash", SCRIPT, *command], cwd=folder, env=env, timeout=30, check=False).returncode


def submitted(folder: Path) -> str:
    path = folder / "submitted"
    return path.read_text().strip() if path.exists() else ""


def unsaved(folder: Path) -> str:
    """What the next job begins to count with."""
    return (folder / "runs/train-8/unsaved").read_text()


def test_of_the_shell_that_submits_the_job_takes_its_path_only(folder: Path) -> None:
    """Grid Engine shows to everybody what is exported, secrets as well."""
    options = [line.split() for line in SCRIPT.read_text().splitlines() if line.startswith("#$ -")]
    assert len(options) > 4
    assert not [words for words in options if {"-v", "-V"} & set(words)]
    assert run(folder, 'echo "$PATH" > path') == 0
    assert (folder / "path").read_text().endswith(":/of/who/submits\n")


def test_a_job_that_may_not_submit_is_put_back(folder: Path) -> None:
    assert run(folder, "exit 75", qresub="exit 1") == 99
    assert not (folder / "runs/train-8").exists()


def test_a_failure_is_not_repeated(folder: Path) -> None:
    for code in (1, 78):
        assert run(folder, f"exit {code}", limit="3600") == code
    assert not submitted(folder)
    assert (folder / "asked").read_text() == "-inherit -nostdin b true\n"


@pytest.mark.parametrize("code", [134, 135, 139])
def test_a_crash_has_the_job_repeated(folder: Path, code: int) -> None:
    for limit in ("", "3600"):
        (folder / "runs/train-7/unsaved").unlink(missing_ok=True)
        assert run(folder, f"exit {code}", limit=limit) == 75
        assert submitted(folder) == "7"
        assert unsaved(folder) == "1\n"
        assert run(folder, f"exit {code}", limit=limit, repeats=3) == code


def test_a_lost_host_has_the_job_repeated_three_times_in_a_row(folder: Path) -> None:
    (folder / "lost").touch()
    assert run(folder, "exit 1", limit="3600", repeats=2) == 75
    assert unsaved(folder) == "3\n"
    (folder / "submitted").unlink()
    assert run(folder, "exit 1", limit="3600", repeats=3) == 1
    assert not submitted(folder)


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"command": ()}, "the command of a rank is missing"),
        ({"task": "3"}, "submit a job for each number in place of an array"),
        ({"limit": "120"}, "h_rt is 120 s; valid is more than 120 s"),
    ],
)
def test_what_cannot_go_well_is_refused(
    folder: Path, capfd: pytest.CaptureFixture[str], given: dict[str, Any], refused: str
) -> None:
    assert run(folder, "exit 0", **given) == 1
    assert refused in capfd.readouterr().out
    assert not (folder / "arguments").exists()


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

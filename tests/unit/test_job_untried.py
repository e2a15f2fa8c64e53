"""The job files that nobody has run, with programs that stand in for mpirun and the schedulers'."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.unit.job_files import JOBS, stand_in

NAMES = ("pbs.pbs", "lsf.lsf")


def run(folder: Path, name: str, mpirun: str, limit_s: int = 7200) -> int:
    """Return the exit code of the script in the environment that the scheduler sets."""
    stand_in(folder, "mpirun", f'printf "%s\\n" "$@" > arguments\n{mpirun}')
    stand_in(folder, "qsub", 'echo "$@" > submitted')
    (folder / "nodefile").write_text("a\na\nb\nb\n")
    env = dict(
        os.environ,
        PATH=f"{folder}:{os.environ['PATH']}",
        LSB_JOBID="7",
        LSB_MCPU_HOSTS="a 2 b 2",
        LSB_DJOB_NUMPROC="4",
        LIMIT_S=str(limit_s),
        PBS_JOBID="7.server",
        PBS_JOBNAME="train",
        PBS_O_WORKDIR=str(folder),
        PBS_NODEFILE=str(folder / "nodefile"),
        PBS_O_PATH=f"{folder}:{os.environ['PATH']}:/of/who/submits",
    )
    script = (JOBS / name).read_text().replace("limit_s=7200", f"limit_s={limit_s}")
    return subprocess.run(["bash", "-c", script], cwd=folder, env=env, timeout=30, check=False).returncode


@pytest.mark.parametrize("name", NAMES)
def test_mpirun_gets_the_jobs_hosts_and_the_command(tmp_path: Path, name: str) -> None:
    assert run(tmp_path, name, "exit 3") == 3
    words = (tmp_path / "arguments").read_text().splitlines()
    assert words[:4] == ["-np", "4", "-H", "a:2,b:2"]
    assert words[-4:] == ["python", "train.py", "--checkpoint", "runs/saved"]
    assert words[words.index("--output-filename") + 1] == "runs/train-7"
    assert (tmp_path / "runs/train-7").is_dir()


def test_of_the_shell_that_submits_pbs_takes_its_path_only(tmp_path: Path) -> None:
    """PBS shows to everybody what is exported, secrets as well."""
    options = [line.split() for line in (JOBS / "pbs.pbs").read_text().splitlines() if line.startswith("#PBS -")]
    assert len(options) > 4
    assert not [words for words in options if {"-v", "-V"} & set(words)]
    assert run(tmp_path, "pbs.pbs", 'echo "$PATH" > path') == 0
    assert (tmp_path / "path").read_text().endswith(":/of/who/submits\n")


@pytest.mark.parametrize(("name", "submitted"), [("lsf.lsf", ""), ("pbs.pbs", "jobs/pbs.pbs\n")])
def test_exit_code_75_puts_the_job_back(tmp_path: Path, name: str, submitted: str) -> None:
    assert run(tmp_path, name, "exit 75") == 75
    asked = tmp_path / "submitted"
    assert (asked.read_text() if asked.exists() else "") == submitted


@pytest.mark.parametrize("name", NAMES)
def test_the_ranks_are_told_before_the_time_limit(tmp_path: Path, name: str) -> None:
    assert run(tmp_path, name, "trap 'touch told; exit 1' USR2; while :; do sleep 0.02; done", limit_s=121) == 1
    assert (tmp_path / "told").exists()

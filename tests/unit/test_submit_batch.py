"""The batch scripts of Grid Engine, PBS and LSF, run with programs that stand in for mpirun and the schedulers'."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.unit.job_files import render, stand_in
from trainer.cli import main
from trainer.errors import ConfigError

NAMES = ("gridengine", "pbs", "lsf")
NODES = ["--nodes", "2", "--ranks-per-node", "2"]
COMMAND = ["--", "python", "train.py", "a b"]


def run(folder: Path, name: str, mpirun: str, *options: str) -> int:
    """Return the exit code of the script in the environment that the scheduler sets."""
    stand_in(folder, "mpirun", f'printf "%s\\n" "$@" > arguments\n{mpirun}')
    stand_in(folder, "qsub", 'echo "$@" > submitted')
    stand_in(folder, "qrsh", "")
    (folder / "hostfile").write_text("a 2 all.q@a UNDEFINED\nb 2 all.q@b UNDEFINED\n")
    (folder / "nodefile").write_text("a\na\nb\nb\n")
    env = dict(
        os.environ,
        PATH=f"{folder}:{os.environ['PATH']}",
        JOB_ID="7",
        SGE_TASK_ID="3",
        LSB_JOBID="7",
        LSB_JOBINDEX="3",
        PBS_JOBID="7.server",
        PBS_JOBNAME="train",
        PBS_O_WORKDIR=str(folder),
        LSB_MCPU_HOSTS="a 2 b 2",
        PE_HOSTFILE=str(folder / "hostfile"),
        PBS_NODEFILE=str(folder / "nodefile"),
        **dict.fromkeys(("SGE_O_PATH", "PBS_O_PATH"), f"{folder}:{os.environ['PATH']}:/of/who/submits"),
    )
    script = render(name, *NODES, *options, *COMMAND)
    return subprocess.run(["bash", "-c", script], cwd=folder, env=env, timeout=30, check=False).returncode


@pytest.mark.parametrize("name", NAMES)
def test_mpirun_gets_the_jobs_hosts_and_the_command(tmp_path: Path, name: str) -> None:
    assert run(tmp_path, name, "exit 3") == 3
    words = (tmp_path / "arguments").read_text().splitlines()
    assert words[:4] == ["-np", "4", "-H", "a:2,b:2"]
    assert words[-3:] == ["python", "train.py", "a b"]
    assert words[words.index("--output-filename") + 1] == "runs/train-7"
    assert (tmp_path / "runs/train-7").is_dir()


@pytest.mark.parametrize("name", ["gridengine", "pbs"])
def test_of_the_shell_that_submits_the_job_takes_its_path_only(tmp_path: Path, name: str) -> None:
    """Grid Engine and PBS show to everybody what is exported, secrets as well."""
    script = render(name, *NODES, "--time", "1h", *COMMAND)
    options = [line.split() for line in script.splitlines() if line.startswith(("#$ -", "#PBS -"))]
    assert len(options) > 4
    assert not [words for words in options if {"-v", "-V"} & set(words)]
    assert "qsub -V" not in script
    assert run(tmp_path, name, 'echo "$PATH" > path') == 0
    assert (tmp_path / "path").read_text().endswith(":/of/who/submits\n")


@pytest.mark.parametrize(("name", "submitted"), [("lsf", ""), ("pbs", "train.pbs")])
def test_exit_code_75_puts_the_job_back(tmp_path: Path, name: str, submitted: str) -> None:
    assert run(tmp_path, name, "exit 75") == 75
    asked = tmp_path / "submitted"
    assert (asked.read_text() if asked.exists() else "") == (f"runs/{submitted}\n" if submitted else "")


@pytest.mark.parametrize("name", NAMES)
def test_the_ranks_are_told_before_the_time_limit(tmp_path: Path, name: str) -> None:
    code = run(
        tmp_path, name, "trap 'touch told; exit 1' USR2; while :; do sleep 0.02; done", "--time", "3s", "--grace", "2s"
    )
    assert code == (75 if name == "gridengine" else 1)  # which then goes on
    assert (tmp_path / "told").exists()


@pytest.mark.parametrize("name", ["gridengine", "lsf"])
def test_the_jobs_of_an_array_have_logs_of_their_own(tmp_path: Path, name: str) -> None:
    options = [*NODES, "--array", "1-3", "--", "python", "a.py", "{index}"]
    script = render(name, *options)
    variable = {"gridengine": "SGE_TASK_ID", "lsf": "LSB_JOBINDEX"}[name]
    assert f'a.py "${variable}"\n' in script
    assert f"-${variable}\n" in script


def test_what_a_scheduler_lacks_is_refused_with_what_to_do() -> None:
    for name, options, problem in (
        ("gridengine", ["--gpus-per-node", "2"], "gridengine has no --gpus-per-node; name the site's resource"),
        ("gridengine", ["--array", "0-3"], "gridengine counts from 1"),
        ("lsf", ["--memory", "1GB"], "lsf has no --memory; its unit is the site's"),
        ("pbs", ["--array", "1-3"], "pbs has no --array; submit a job for each"),
        ("pbs", ["--image", "a"], "pbs has no --image; start the container runtime in the command"),
        ("pbs", ["--directive=x"], "--directive is 'x'"),
    ):
        with pytest.raises(ConfigError) as error:
            render(name, *NODES, *options, *COMMAND)
        assert problem in str(error.value)


@pytest.mark.parametrize("name", ["pbs", "lsf", "tione"])
def test_of_a_scheduler_that_nobody_has_run_the_file_is_only_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    options = [*NODES, "--image", "a", "--directive=InstanceType=a"] if name == "tione" else NODES
    assert main(["submit", name, *options, *COMMAND]) == 0
    (path,) = (tmp_path / "runs").iterdir()
    assert path.read_text() == render(name, *options, *COMMAND)
    assert f"runs/{path.name} is written, not submitted" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=f"{name} has no --follow"):
        render(name, *options, "--follow", *COMMAND)

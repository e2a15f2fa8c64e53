"""What the job files for Slurm do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unit.job_files import JOBS, stand_in

BIN = Path(sys.executable).parent
COMMAND = ["python", "train.py", "--checkpoint", "runs/a b"]


class Batch:
    """The script, run with an srun and a scontrol of the test's own."""

    def __init__(
        self,
        folder: Path,
        srun: str,
        name: str = "slurm.sbatch",
        ready: str = "touch $LOGS/ready-{0..3}",
        command: Sequence[str] = COMMAND,
        **variables: str,
    ) -> None:
        self.folder = folder
        probe = 'if [ "${@: -1}" = true ]; then [ ! -e node-is-lost ]; exit; fi'
        stand_in(folder, "srun", f'{probe}\ntouch srun-runs; printf "%s\\n" "$@" > srun-arguments\n{ready}\n{srun}')
        stand_in(
            folder, "scontrol", '[ ! -s refusals ] || { sed -i 1d refusals; exit 1; }; echo "$@" > scontrol-arguments'
        )
        script = (JOBS / name).read_text().replace("sleep 5", "sleep 0.2").replace("sleep $pause", "")
        (folder / "job.sbatch").write_text(script.replace("step=$!", "$BEFORE_STEP\nstep=$!"))
        env = dict(
            os.environ,
            PATH=f"{folder}:{BIN}:{os.environ['PATH']}",
            SLURM_JOB_ID="17",
            SLURM_JOB_NAME="train",
            SLURM_NTASKS="4",
            SLURM_NNODES="2",
            LOGS="runs/train-17",
            **variables,
        )
        self._process = subprocess.Popen(
            ["bash", "job.sbatch", *command], cwd=folder, env=env, stdout=subprocess.DEVNULL
        )

    def signal(self, number: signal.Signals) -> None:
        deadline = time.monotonic() + 20
        while not (self.folder / "srun-arguments").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        self._process.send_signal(number)

    def code(self) -> int:
        return self._process.wait(timeout=20)

    @property
    def requeued(self) -> str:
        asked = self.folder / "scontrol-arguments"
        return asked.read_text() if asked.exists() else ""

    @property
    def is_requeued(self) -> bool:
        return self.requeued == "requeue 17\n"


@pytest.mark.parametrize(("code", "again"), [(0, False), (1, False), (78, False), (75, True), (140, False)])
def test_only_exit_code_75_puts_the_job_back(tmp_path: Path, code: int, again: bool) -> None:
    batch = Batch(tmp_path, f"exit {code}")
    assert batch.code() == (0 if again else code)
    assert batch.is_requeued == again


def test_of_an_array_only_the_job_itself_is_put_back(tmp_path: Path) -> None:
    # The job of an array that is started last has the array's own id.
    batch = Batch(tmp_path, "exit 75", SLURM_ARRAY_JOB_ID="17", SLURM_ARRAY_TASK_ID="3")
    assert batch.code() == 0
    assert batch.requeued == "requeue 17_3\n"


@pytest.mark.parametrize(("code", "again"), [(75, True), (140, True), (137, True), (1, True), (78, False), (0, False)])
def test_usr2_is_handed_on_to_the_step(tmp_path: Path, code: int, again: bool) -> None:
    batch = Batch(tmp_path, f"trap 'exit {code}' USR2; while :; do sleep 0.02; done")
    batch.signal(signal.SIGUSR2)
    assert batch.code() == (0 if again else code)
    assert batch.is_requeued == again


@pytest.mark.parametrize(("first", "code", "again"), [(75, 0, True), (78, 78, False), (3, 143, False)])
def test_the_code_of_the_rank_that_ended_first_counts(tmp_path: Path, first: int, code: int, again: bool) -> None:
    killed = "echo 'srun: error: n2: task 2: Terminated' >&2; exit 143"
    batch = Batch(tmp_path, f"echo 'srun: error: n1: task 0: Exited with exit code {first}' >&2; {killed}")
    assert batch.code() == code
    assert batch.is_requeued == again


@pytest.mark.parametrize("lost", [True, False])
def test_starts_that_do_not_save_are_repeated_three_times_in_a_row(tmp_path: Path, lost: bool) -> None:
    if lost:
        (tmp_path / "node-is-lost").touch()
    else:
        stand_in(tmp_path, "cat", "kill -USR2 $PPID")  # the script calls it after the step
    codes = [Batch(tmp_path, f"exit {code}").code() for code in (1, 1, 75, 1, 1, 1, 1)]
    assert codes == [0, 0, 0, 0, 0, 0, 1]


def test_a_signal_that_comes_before_the_ranks_puts_the_job_back(tmp_path: Path) -> None:
    stand_in(tmp_path, "mkdir", "kill -USR2 $PPID; sleep 0.2")
    batch = Batch(tmp_path, "exit 0")
    assert batch.code() == 0
    assert batch.is_requeued
    assert not (tmp_path / "srun-runs").exists()


def test_a_signal_that_comes_as_the_ranks_are_started_reaches_them(tmp_path: Path) -> None:
    srun = "trap 'exit 75' USR2; kill -USR2 $PPID; for i in {1..100}; do sleep 0.02; done"
    batch = Batch(tmp_path, srun, BEFORE_STEP="sleep 0.3")
    assert batch.code() == 0
    assert batch.is_requeued


def test_ranks_that_do_not_ignore_usr2_yet_are_told_later(tmp_path: Path) -> None:
    # Slurm sends it as soon as the ranks are started, and those that have not come to their first line would end by it.
    (tmp_path / "runs/train-17").mkdir(parents=True)
    for rank in range(4):
        (tmp_path / f"runs/train-17/ready-{rank}").touch()  # of an earlier start
    ready = "touch $LOGS/ready-{0..2}; sleep 0.6; trap 'exit 75' USR2; touch $LOGS/ready-3"
    batch = Batch(tmp_path, "for i in {1..100}; do sleep 0.02; done", ready=ready)
    batch.signal(signal.SIGUSR2)
    assert batch.code() == 0
    assert batch.is_requeued
    assert (tmp_path / "runs/train-17/unsaved").read_text() == "0\n"


@pytest.mark.parametrize(("refusals", "code"), [(3, 0), (4, 75)])
def test_a_controller_that_does_not_answer_is_asked_again(tmp_path: Path, refusals: int, code: int) -> None:
    (tmp_path / "refusals").write_text("\n" * refusals)
    batch = Batch(tmp_path, "exit 75")
    assert batch.code() == code
    assert batch.is_requeued == (code == 0)


def test_a_job_that_is_cancelled_does_not_come_back(tmp_path: Path) -> None:
    batch = Batch(tmp_path, "sleep 0.5; exit 75")
    batch.signal(signal.SIGTERM)
    assert batch.code() == 75
    assert not batch.is_requeued

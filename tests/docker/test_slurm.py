"""The job files for Slurm on a real Slurm of two nodes: a controller and two nodes in containers."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.docker.cluster import succeed
from tests.docker.submitted import SchedulerCluster, Submitted, end_jobs, started, training, until_told, wait_for

# A job that was put back waits for some seconds each time, and signals come once a minute.
pytestmark = pytest.mark.timeout(600)
_ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")


class SlurmCluster(SchedulerCluster):
    """The containers, and a user on the controller."""

    scheduler = "slurm"

    def end_jobs(self) -> None:
        self.root("scancel", "--user", "trainer")
        wait_for("the end of all jobs", lambda: not self.root("squeue", "-h"))

    def submit(self, name: str, options: tuple[str, ...], command: tuple[str, ...]) -> str:
        file = "jobs/slurm-torchrun.sbatch" if "torchrun" in name else "jobs/slurm.sbatch"
        words = ("sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=2", f"--job-name={name}", *options, file)
        return succeed([*self.exec("ctl"), *words, *command]).strip()

    def exit_code(self, job: str) -> int | None:
        shown = self.run("ctl", "scontrol", "-o", "show", "job", job).output  # a line for each job of an array
        states = re.findall(r"JobState=(\w+).*? ExitCode=(\d+)", shown)
        if not states or any(state not in _ENDS for state, _ in states):
            return None
        return max(0 if state == "COMPLETED" else int(code) or 1 for state, code in states)

    def ask(self, job: str, field: str) -> str:
        """A field of what Slurm knows of a job."""
        found = re.search(rf"\b{field}=(\S*)", self.run("ctl", "scontrol", "-o", "show", "job", job).output)
        return found[1] if found else ""

    def log(self, name: str) -> str:
        return self.shell("ctl", f"cat runs/{name}-*.log runs/{name}-*/rank-*.log 2> /dev/null")

    def describe(self, job: str) -> str:
        return self.run("ctl", "scontrol", "show", "job", job).output


@pytest.fixture(scope="module")
def slurm(image: str) -> Iterator[SlurmCluster]:
    with started(SlurmCluster, image) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _ends_what_it_has_started(slurm: SlurmCluster) -> Iterator[None]:
    yield
    end_jobs(slurm)


@pytest.mark.parametrize("launcher", ["srun", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_training_on_two_nodes(slurm: SlurmCluster, launcher: str) -> None:
    name = f"train-{launcher}"
    job = Submitted(slurm, name, "--time=10", command=training(name, 2))
    outcome = job.end()
    assert outcome.code == 0, outcome.output
    assert "test accuracy" in outcome.output
    strategy = "Horovod over MPI" if launcher == "srun" else "DDP over Gloo"
    assert f"{strategy}, rank 0 of 4" in outcome.output
    logs = slurm.shell("ctl", f"cd runs/{name}-{job.job} && echo rank-*.log").split()
    assert logs == [f"rank-{rank}.log" for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_the_time_limit(slurm: SlurmCluster, launcher: str) -> None:
    name = f"limit-{launcher}"
    job = Submitted(slurm, name, "--time=2", "--signal=B:USR2@50", command=until_told(slurm, name))
    outcome = job.end()
    assert outcome.code == 0, outcome.output
    assert "done" in outcome.output
    assert "back into the queue" in outcome.output
    assert "going on from checkpoint" in outcome.output
    assert int(slurm.ask(job.job, "Restarts")) >= 1


@pytest.mark.slow
def test_a_job_whose_node_is_lost_goes_on_when_it_is_back(slurm: SlurmCluster) -> None:
    job = Submitted(slurm, "lost", command=(*training("lost", 3), "--checkpoint-every", "1"))
    job.wait_until_it_trains()
    slurm.compose("kill", "n2")
    try:
        wait_for("the end on the lost node", lambda: slurm.ask(job.job, "JobState") == "PENDING", job.describe)
    finally:
        slurm.compose("start", "n2")
    outcome = job.end()
    assert outcome.code == 0, outcome.output
    assert "going on from checkpoint" in outcome.output
    assert int(slurm.ask(job.job, "Restarts")) >= 1

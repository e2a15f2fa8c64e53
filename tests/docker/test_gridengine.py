"""The job file for Grid Engine on a real Grid Engine: a master and two execution hosts in containers."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from tests.docker.cluster import succeed
from tests.docker.submitted import SchedulerCluster, Submitted, end_jobs, started, training, wait_for

pytestmark = pytest.mark.timeout(600)


class GridEngineCluster(SchedulerCluster):
    """The containers, and a user on the master."""

    scheduler = "gridengine"

    def end_jobs(self) -> None:
        self.run("ctl", "qdel", "-u", "trainer")
        wait_for("the end of all jobs", lambda: not self.root("qstat", "-u", "*"))

    def submit(self, name: str, options: tuple[str, ...], command: tuple[str, ...]) -> str:
        words = ("qsub", "-terse", "-pe", "mpi", "4", "-N", name, *options, "jobs/gridengine.sge")
        return succeed([*self.exec("ctl"), *words, *command]).strip()

    def exit_code(self, job: str) -> int | None:
        if self.run("ctl", "qstat", "-j", job).code == 0:
            return None
        log = self.shell("ctl", f"cat runs/*-{job}.log 2> /dev/null")
        if next_job := re.search(r"^goes on as job (\d+)$", log, re.MULTILINE):
            return self.exit_code(next_job[1])
        time.sleep(5.0)  # the accounting, a record for each host, is written a while after the end
        records = re.findall(r"^failed +(\d+).*\nexit_status +(\d+)", self.run("ctl", "qacct", "-j", job).output, re.M)
        codes = [int(code) or int(failed) for failed, code in records if failed != "25"]  # 25: was queued again
        return max(codes, default=None)

    def jobs(self) -> list[str]:
        """The ids of the jobs that wait or run."""
        return re.findall(r"^ +(\d+) ", self.run("ctl", "qstat").output, re.MULTILINE)

    def log(self, name: str) -> str:
        return self.shell("ctl", f"cat runs/{name}-*.log 2> /dev/null")

    def describe(self, job: str) -> str:
        return self.shell("ctl", f"qstat -f; qstat -j {job} || qacct -j {job}")

    def first_host(self) -> str:
        """The host on which the script of the running job is."""
        (host,) = re.findall(r"all\.q@(n\d) +MASTER", self.run("ctl", "qstat", "-g", "t").output)
        return str(host)


@pytest.fixture(scope="module")
def gridengine(image: str) -> Iterator[GridEngineCluster]:
    with started(GridEngineCluster, image) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _ends_what_it_has_started(gridengine: GridEngineCluster) -> Iterator[None]:
    yield
    end_jobs(gridengine)


def test_a_training_on_two_nodes(gridengine: GridEngineCluster) -> None:
    job = Submitted(gridengine, "train", "-l", "h_rt=600", command=training("train", 2))
    outcome = job.end()
    assert outcome.code == 0, outcome.output
    assert "test accuracy" in outcome.output
    assert re.search(r"4 ranks on (n1: 2, n2: 2|n2: 2, n1: 2); Horovod over MPI, rank 0 of 4", outcome.output)
    logs = gridengine.shell("ctl", f"cd runs/train-{job.job}/1 && echo rank.*").split()
    assert logs == [f"rank.{rank}" for rank in range(4)]


@pytest.mark.slow
def test_the_time_limit(gridengine: GridEngineCluster) -> None:
    job = Submitted(gridengine, "limit", "-l", "h_rt=120", "-v", "GRACE_S=60", command=training("limit", 4))
    outcome = job.end()
    assert outcome.code == 0, outcome.output
    assert f"exit code 75: back into the queue\ngoes on as job {int(job.job) + 1}\n" in outcome.output
    assert "going on from checkpoint" in outcome.output


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["first", "second"])
def test_a_job_whose_host_is_lost_goes_on(gridengine: GridEngineCluster, lost: str) -> None:
    # Without a checkpointing environment, Grid Engine deletes a job of which a task on another host has been killed.
    options = ["-ckpt", "restart"] if lost == "first" else []
    job = Submitted(
        gridengine, f"lost-{lost}", *options, command=(*training(f"lost-{lost}", 3), "--checkpoint-every", "1")
    )
    job.wait_until_it_trains()
    first = gridengine.first_host()
    host = first if lost == "first" else {"n1": "n2", "n2": "n1"}[first]
    gridengine.compose("kill", host)
    try:
        wait_for("the end on the lost host", lambda: re.search(r" (Rq|qw) ", gridengine.run("ctl", "qstat").output),
                 job.describe)  # fmt: skip
    finally:
        gridengine.compose("start", host)
    outcome = job.end()
    assert outcome.code == 0, outcome.output
    assert "going on from checkpoint" in outcome.output

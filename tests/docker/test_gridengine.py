"""`trainer submit gridengine` on a real Grid Engine: a master and two execution hosts in containers."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import pytest

from tests.docker.submitted import SchedulerCluster, Submitted, end_jobs, started, training, wait_for

pytestmark = pytest.mark.timeout(600)


class GridEngineCluster(SchedulerCluster):
    """The containers, and a user on the master."""

    scheduler = "gridengine"

    def end_jobs(self) -> None:
        self.run("ctl", "qdel", "-u", "trainer")
        wait_for("the end of all jobs", lambda: not self.root("qstat", "-u", "*"))

    def ids(self, name: str) -> list[str]:
        lines = self.run("ctl", "qstat", "-r").output
        return re.findall(rf"^ +(\d+) .*\n +Full jobname: +{name}$", lines, re.MULTILINE)

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
    job = Submitted(gridengine, "train", "--time", "10min", *training("train", 2))
    outcome = job.end()
    assert outcome.code == 0, outcome.output
    assert "test accuracy" in outcome.output
    assert f"qdel {job.job} ends it" in outcome.output
    assert re.search(r"4 ranks on (n1: 2, n2: 2|n2: 2, n1: 2); Horovod over MPI, rank 0 of 4", outcome.output)
    logs = gridengine.shell("ctl", f"cd runs/train-{job.job}/1 && echo rank.*").split()
    assert logs == [f"rank.{rank}" for rank in range(4)]


@pytest.mark.slow
def test_the_time_limit(gridengine: GridEngineCluster) -> None:
    job = Submitted(gridengine, "limit", "--time", "2min", "--grace", "60s", *training("limit", 4))
    outcome = job.end()
    assert outcome.code == 0, outcome.output
    assert "exit code 75: goes on as job" in outcome.output
    assert f"job {job.job} goes on as job {int(job.job) + 1}; qdel {int(job.job) + 1} ends it" in outcome.output
    assert "going on from checkpoint" in outcome.output


@pytest.mark.slow
def test_ranks_that_have_saved_go_on_in_another_job(gridengine: GridEngineCluster) -> None:
    program = "import os, sys; sys.exit(75 if sys.argv[1] == os.environ['JOB_ID'] else 0)"
    first = int(gridengine.run("ctl", "qsub", "-terse", "-b", "y", "true").output) + 1
    outcome = Submitted(gridengine, "again", "--", "python", "-c", program, str(first)).end()
    assert outcome.code == 0, outcome.output
    assert f"exit code 75: goes on as job {first + 1}" in outcome.output


@pytest.mark.slow
def test_a_job_that_is_deleted_stays_ended(gridengine: GridEngineCluster) -> None:
    job = Submitted(gridengine, "delete", *training("delete", 5))
    job.wait_until_it_trains()
    assert gridengine.run("ctl", "qdel", job.job).code == 0
    outcome = job.end()
    assert outcome.code == 1, outcome.output
    assert f"job {job.job}: ended" in outcome.output
    assert not gridengine.ids("delete")


@pytest.mark.slow
def test_a_job_that_is_deleted_leaves_no_rank_that_waits_for_nothing(gridengine: GridEngineCluster) -> None:
    # As ranks over Gloo, which do not notice that mpirun has gone.
    # In one piece, or the ranks' lines would mix.
    program = (
        "import os, sys, time; sys.stdout.write('rank ' + os.environ['OMPI_COMM_WORLD_RANK'] + '\\n'); time.sleep(500)"
    )
    job = Submitted(gridengine, "idle", "--", "python", "-c", program)
    for rank in range(4):
        job.wait_until_it_trains(f"rank {rank}")
    assert all(gridengine.left_over(host, within_s=0) for host in ("n1", "n2"))
    assert gridengine.run("ctl", "qdel", job.job).code == 0
    assert job.end().code == 1
    assert not any(gridengine.left_over(host) for host in ("n1", "n2"))


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["first", "second"])
def test_a_job_whose_host_is_lost_goes_on(gridengine: GridEngineCluster, lost: str) -> None:
    # Without a checkpointing environment, Grid Engine deletes a job of which a task on another host has been killed.
    options = ["--directive=-ckpt restart"] if lost == "first" else []
    job = Submitted(gridengine, f"lost-{lost}", *options, *training(f"lost-{lost}", 3), "--checkpoint-every", "1s")
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


@pytest.mark.slow
def test_a_mistake_in_the_script_is_not_tried_again(gridengine: GridEngineCluster) -> None:
    job = Submitted(gridengine, "mistake", *training("mistake", 1), "--precision", "none")
    outcome = job.end()
    assert outcome.code == 78, outcome.output
    assert "precision is 'none'" in outcome.output


@pytest.mark.slow
def test_each_job_of_an_array_goes_on_by_itself(gridengine: GridEngineCluster) -> None:
    program = (
        "import os, pathlib, sys; saved = pathlib.Path('runs', 'saved-' + sys.argv[1]); print('number', sys.argv[1]);"
        "code = 75 if os.environ['OMPI_COMM_WORLD_RANK'] == '0' and not saved.exists() else 0;"
        "code and saved.touch(); sys.exit(code)"
    )
    outcome = Submitted(gridengine, "array", "--array", "3-4", "--", "python", "-c", program, "{index}").end()
    assert outcome.code == 0, outcome.output
    assert sorted(set(re.findall(r"number \d", outcome.output))) == ["number 3", "number 4"]
    assert len(re.findall(r"exit code 75: goes on as job \d", outcome.output)) == 2


def test_a_parallel_environment_that_is_not_there_is_one_line(gridengine: GridEngineCluster) -> None:
    command = ["trainer", "submit", "gridengine", "--nodes", "2", "--ranks-per-node", "2", "--directive=-pe none 4"]
    done = subprocess.run(
        [*gridengine.exec("ctl"), *command, "--", "true"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("trainer submit: qsub refuses: Unable to run job"), done.stderr
    assert done.stderr.count("\n") == 1

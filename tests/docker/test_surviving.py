"""`trainer run` on two nodes that are lost and come back, and on a network that is cut.

The job writes down which samples were in each update. A job that went on rightly has each of them in each epoch once.
"""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest

from benchmarks.chaos_records import Result, problems_of, read_result, read_starts
from tests.docker.cluster import ROOT, Cluster, Outcome, run, succeed

pytestmark = pytest.mark.timeout(280)

FOLDER, CHECKPOINTS = "runs/surviving", "/tmp/checkpoints"  # noqa: S108 (in the containers)
JOB = ["python", f"{FOLDER}/chaos_job.py", FOLDER, "--dataset", "digits", "--global-batch-size", "100"]
DEADLINE_S = 200.0


class Supervised:
    """A call of `trainer run` on node a."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._outcomes: list[Outcome] = []
        self._job: threading.Thread | None = None
        for node in ("a", "b"):
            cluster.shell(node, f"rm -rf {FOLDER} {CHECKPOINTS} /tmp/job.log; mkdir -p {FOLDER}")
        cluster.compose("cp", str(ROOT / "benchmarks" / "chaos_job.py"), f"a:/trainer/{FOLDER}/")

    def start(
        self, *options: str, hosts: str = "a:2,b:2", epochs: int = 60, pause_s: float = 0.02,
        checkpoints: str = CHECKPOINTS,
    ) -> None:  # fmt: skip
        job = [*JOB, str(epochs), checkpoints, "--pause-s", str(pause_s), "--every-s", "0.5"]
        ranks = sum(int(host.partition(":")[2]) for host in hosts.split(","))
        command = ["trainer", "run", "--name", "surviving", "-np", str(ranks), "-H", hosts, *options, *job]
        script = f"{' '.join(command)} > /tmp/job.log 2>&1; code=$?; cat /tmp/job.log; exit $code"
        call = self.cluster.run

        def wait() -> None:
            self._outcomes.append(call("a", "bash", "-c", script, timeout_s=DEADLINE_S))

        self._job = threading.Thread(target=wait, daemon=True)
        self._job.start()

    def log(self) -> str:
        return self.cluster.shell("a", "cat /tmp/job.log 2> /dev/null")

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not re.search(pattern, seen := self.log(), re.DOTALL):
            assert self._job is not None
            assert self._job.is_alive(), f"it has ended before {pattern!r}:\n{seen}"
            assert time.monotonic() < deadline, f"no {pattern!r}:\n{seen}"
            time.sleep(0.5)

    def end(self) -> Outcome:
        assert self._job is not None
        self._job.join(timeout=DEADLINE_S)
        assert self._outcomes, f"it does not end:\n{self.log()}"
        for node in ("a", "b"):
            if run(["docker", "exec", self.cluster.container(node), "true"]).code == 0:
                assert self.cluster.left_over(node) == ""
        return self._outcomes.pop()

    def result(self, folder: Path) -> Result:
        """Check that each sample was in each epoch once; return the result."""
        self.cluster.compose("cp", f"a:/trainer/{FOLDER}/.", str(folder))
        result = read_result(folder)
        assert problems_of(result, read_starts(folder)) == []
        return result


@pytest.fixture
def supervised(cluster: Cluster) -> Supervised:
    return Supervised(cluster)


def said(outcome: Outcome) -> list[str]:
    return [line for line in outcome.output.splitlines() if line.startswith("trainer run: ")]


@pytest.mark.slow
def test_a_network_that_is_cut_and_heals(supervised: Supervised, tmp_path: Path) -> None:
    supervised.start("--min-np", "2", epochs=60)
    supervised.wait_for("epoch 5/")
    ends = [supervised.cluster.network, supervised.cluster.container("b")]
    succeed(["docker", "network", "disconnect", *ends])
    try:
        supervised.wait_for("attempt 2: 2 ranks on a:2.*going on from checkpoint attempt-0001")
    finally:
        succeed(["docker", "network", "connect", "--alias", "b", *ends])
    outcome = supervised.end()
    assert outcome.code == 0, outcome.output
    assert any("attempt 1: host b is lost: " in line for line in said(outcome))
    assert len(supervised.result(tmp_path).lineage) == 2


def test_too_few_nodes_are_waited_for_and_then_named(supervised: Supervised) -> None:
    victim = supervised.cluster.container("b")
    supervised.start("--wait-for-hosts", "5")
    supervised.wait_for("epoch 2/")
    succeed(["docker", "kill", victim])
    outcome = supervised.end()
    assert outcome.code == 1, outcome.output
    assert said(outcome)[-1].startswith("trainer run: given up: 2 of at least 4 slots are left: b does not answer (")

"""`trainer doctor` on two nodes: causes of failures are made, and the first line has to name each."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator

import pytest

from tests.docker.cluster import Cluster, run
from tests.docker.doctor_causes import CAUSES, Cause, Nodes

MOST_S, MOST_LINES = 20.0, 3
"""What follows from a cause is left out."""
# One of each part, and only those that are made while the nodes run.
SHORT = (
    "b's firewall drops new connections, ssh excepted",
    "an MTU of 1200 in the middle, without ICMP",
    "a's /etc/hosts: b is 127.0.1.1",
    "b's /etc/hosts: a is an address that nobody has",
    "b's host key has changed",
    "b's .bashrc prints",
    "other code of the library on b",
    "a PATH without Open MPI on b",
    "32 MB for checkpoints on b",
)


@pytest.fixture(scope="module")
def nodes(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    nodes = Nodes(f"trainer-test-doctor-{os.getpid()}", tmp_path_factory.mktemp("doctor"))
    nodes.start({})
    try:
        yield nodes
    finally:
        nodes.down()


def param(cause: Cause) -> object:
    marks = [pytest.mark.needs("root")]
    return pytest.param(cause, id=cause.title, marks=marks if cause.title in SHORT else [*marks, pytest.mark.slow])


@pytest.mark.parametrize("cause", [param(cause) for cause in CAUSES])
def test_the_first_line_names_the_cause(nodes: Nodes, cause: Cause) -> None:
    with nodes.made(cause):
        began = time.monotonic()
        command = ["docker", "exec", "--workdir", "/trainer", nodes.container(cause.node), "trainer", "doctor"]
        outcome = run([*command, "-H", cause.hosts, *cause.command])
        seconds = time.monotonic() - began
    lines = [line.removeprefix("trainer doctor: ") for line in outcome.output.splitlines()]
    findings = [line for line in lines if line.startswith(("PROBLEM: ", "WARNING: "))]
    assert findings, outcome
    assert re.match(f"{cause.level}: .*{cause.first_line}", findings[0]), outcome
    assert outcome.code == (1 if cause.level == "PROBLEM" else 0)
    assert len(findings) <= MOST_LINES, outcome
    assert seconds <= MOST_S


@pytest.mark.needs("root")
def test_a_job_whose_ranks_cannot_connect_names_the_doctor(nodes: Nodes) -> None:
    cause = next(cause for cause in CAUSES if cause.title == SHORT[0])
    # ssh works, so that the ranks start. Open MPI by itself says nothing for two minutes, and never ends.
    job = "horovodrun -np 2 -H a:1,b:1 python -c 'import trainer; trainer.init(device=\"cpu\")'"
    with nodes.made(cause):
        process = nodes.shell("a", f"cd /trainer; {job} < /dev/null > /tmp/job.log 2>&1 & echo $!").strip()
        said = "grep -m 1 'have not connected' /tmp/job.log || tail -c 2000 /tmp/job.log"
        waits = "for i in $(seq 60); do ! grep -q 'have not' /tmp/job.log || break; sleep 1; done"
        line = nodes.shell("a", f"{waits}; {said}")
        nodes.shell("a", f"kill {process}")
    assert "trainer: the ranks have not connected so far" in line
    assert "`trainer doctor`, with -H as the job has it, says why" in line


def test_a_healthy_cluster_is_one_line_and_nothing_is_left(cluster: Cluster) -> None:
    outcome = cluster.run("a", "trainer", "doctor", "-H", "a:2,b:2", "python", "examples/mnist.py")
    assert outcome.code == 0, outcome.output
    assert re.fullmatch(
        r"trainer doctor: ok: login a .* s, b .* s; each two hosts .* Gbit/s at worst; PyTorch .*\n", outcome.output
    )
    for node in ("a", "b"):
        assert cluster.shell(node, "pgrep -fa 'sys.stdin.buffer|trainer doctor' | grep -v pgrep") == ""

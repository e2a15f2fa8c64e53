"""`trainer doctor` on two nodes: some causes of each kind are made, and the first line has to name them.

`benchmarks/doctor_faults.py` makes all of them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator

import pytest

from benchmarks.doctor_catalogue import CAUSES
from benchmarks.doctor_causes import Cause, made
from benchmarks.doctor_faults import try_cause
from benchmarks.doctor_nodes import Nodes
from tests.docker.cluster import Cluster

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
LOOK = ("trainer", "doctor", "-H", "a:2,b:2")


@pytest.fixture(scope="module")
def nodes(image: str) -> Iterator[Nodes]:
    nodes = Nodes(f"trainer-test-doctor-{os.getpid()}", [])
    try:
        yield nodes
    finally:
        nodes.down()


def param(cause: Cause) -> object:
    marks = [pytest.mark.needs("root")]
    return pytest.param(cause, id=cause.title, marks=marks if cause.title in SHORT else [*marks, pytest.mark.slow])


@pytest.mark.parametrize("cause", [param(cause) for cause in CAUSES])
def test_the_first_line_names_the_cause(nodes: Nodes, cause: Cause) -> None:
    trial = try_cause(nodes, cause)
    assert re.search(cause.first_line, trial.first_line), trial
    assert trial.is_right, trial


@pytest.mark.needs("root")
def test_a_job_whose_ranks_cannot_connect_names_the_doctor(nodes: Nodes) -> None:
    cause = next(cause for cause in CAUSES if cause.title == SHORT[0])
    # ssh works, so that the ranks start. Open MPI by itself says nothing for two minutes, and never ends.
    job = "horovodrun -np 2 -H a:1,b:1 python -c 'import trainer; trainer.init(device=\"cpu\")'"
    with made(nodes, cause):
        started = f"cd /trainer; {job} < /dev/null > /tmp/job.log 2>&1 & echo $!"
        process = nodes.shell("a", started, "1000").strip()
        said = "grep -m 1 'have not connected' /tmp/job.log || tail -c 2000 /tmp/job.log"
        line = nodes.shell(
            "a", f"for i in $(seq 60); do ! grep -q 'have not' /tmp/job.log || break; sleep 1; done; {said}"
        )
        nodes.shell("a", f"kill {process}", "1000")
    assert "trainer: the ranks have not connected so far" in line
    assert "`trainer doctor`, with -H as the job has it, says why" in line


def test_a_healthy_cluster_is_one_line_and_nothing_is_left(cluster: Cluster) -> None:
    outcome = cluster.run("a", *LOOK, "python", "examples/mnist.py")
    assert outcome.code == 0, outcome.output
    assert re.fullmatch(
        r"trainer doctor: ok: login a .* s, b .* s; each two hosts .* Gbit/s and .* ms at worst; Python .*\n",
        outcome.output,
    )
    for node in ("a", "b"):
        assert cluster.shell(node, "pgrep -fa 'sys.stdin.buffer|trainer doctor' | grep -v pgrep") == ""


def test_json_has_the_facts(cluster: Cluster) -> None:
    outcome = cluster.run("a", *LOOK, "--json")
    assert outcome.code == 0, outcome.output
    said = json.loads(outcome.output)
    assert (said["findings"], said["not_looked_at"]) == ([], [])
    assert {(pair["from"], pair["to"]) for pair in said["pairs"]} == {("a", "b"), ("b", "a")}
    assert all(pair["bytes_per_s"] > 1e6 for pair in said["pairs"])
    assert said["hosts"]["b"]["machine"]["host_name"] == "b"

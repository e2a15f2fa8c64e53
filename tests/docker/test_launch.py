"""`trainer.launch` on two nodes, over real ssh: results, a rank's exception, a rank and a caller that are killed."""

from __future__ import annotations

import time

import pytest

from tests.docker.cluster import ROOT, Cluster
from tests.docker.launches import STARTED

pytestmark = pytest.mark.timeout(150)

LAUNCHERS = ("mpi", "gloo", "torchrun")
SCRIPT = "runs/launches.py"


@pytest.fixture
def nodes(cluster: Cluster) -> Cluster:
    """Two nodes; the script is on the one that calls alone, because the function goes to the other by itself."""
    cluster.compose("cp", str(ROOT / "tests" / "docker" / "launches.py"), f"a:/trainer/{SCRIPT}")
    return cluster


def check_nothing_is_left(cluster: Cluster) -> None:
    for node in ("a", "b"):
        assert cluster.left_over(node) == ""
        assert cluster.shell(node, "ls -d /tmp/trainer-launch-* 2> /dev/null") == ""


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_rank_of_both_nodes_returns_its_result(nodes: Cluster, launcher: str) -> None:
    outcome = nodes.run("a", "python", SCRIPT, launcher, "returns")
    results = [f"({rank}, '{node}', 6.0)" for rank, node in enumerate("aabb")]
    assert outcome.code == 0, outcome.output
    assert outcome.output.splitlines()[-4:] == results
    check_nothing_is_left(nodes)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_exception_of_a_rank_on_another_node_is_raised(nodes: Cluster, launcher: str) -> None:
    outcome = nodes.run("a", "python", SCRIPT, launcher, "raises")
    assert outcome.code == 1
    assert outcome.output.splitlines()[-2:] == [
        "FileNotFoundError: there is no such file here",
        "raised by rank 3 of 4 on host b",
    ]
    assert f'{SCRIPT}", line ' in outcome.output, outcome.output  # the traceback of the rank
    check_nothing_is_left(nodes)


@pytest.mark.parametrize(
    ("launcher", "verdict"),
    [
        ("mpi", "rank 3 on b died without a word before its first update (SIGKILL)"),
        ("gloo", "rank 3 on b died without a word before its first update (SIGKILL)"),
        ("torchrun", "rank 3 on b died without a word before its first update"),
    ],
)
def test_a_rank_that_is_killed_on_another_node_is_named(nodes: Cluster, launcher: str, verdict: str) -> None:
    outcome = nodes.run("a", "python", SCRIPT, launcher, "dies")
    assert outcome.code == 1
    assert outcome.output.splitlines()[-1].startswith(f"trainer.errors.LaunchError: {verdict}"), outcome.output
    check_nothing_is_left(nodes)


def test_a_caller_that_is_killed_leaves_nothing_on_either_node(nodes: Cluster) -> None:
    nodes.shell(
        "a", f"rm -f {STARTED}-*; nohup python {SCRIPT} gloo waits > /tmp/launches.log 2>&1 & echo $! > /tmp/caller"
    )
    deadline = time.monotonic() + 60
    while nodes.shell("b", f"ls {STARTED}-2 2> /dev/null") == "":
        assert time.monotonic() < deadline, nodes.shell("a", "cat /tmp/launches.log")
        time.sleep(0.5)
    nodes.shell("a", "kill -KILL $(cat /tmp/caller)")
    check_nothing_is_left(nodes)
    nodes.shell("b", f"rm -f {STARTED}-*")

"""Our own strategies and the communication benchmark, across two nodes."""

from __future__ import annotations

import re
import threading
import time

import pytest

from tests.docker.cluster import Cluster, Outcome
from tests.docker.test_shapes import assert_quiet

# The addresses on which a process listens.
LISTENING = """
import psutil, sys, time
end, found = time.monotonic() + 60, []
while not found and time.monotonic() < end:  # it has only just started
    found = [one for one in psutil.Process(int(sys.argv[1])).net_connections("tcp") if one.status == "LISTEN"]
    time.sleep(0.1)
print(*(one.laddr.ip for one in found))
"""
TRAIN = ["python", "examples/mnist.py", "--dataset", "digits", "--output", "none"]

# A global batch of 64, which suits so few samples.
LEARNING = ["--epochs", "8", "--batch-size", "16", "--lr", "0.01", "--target-accuracy", "85"]


@pytest.mark.parametrize(
    ("strategy", "controller"),
    [
        pytest.param("ring", "--mpi", marks=pytest.mark.slow),
        pytest.param("parameter_server", "--mpi", marks=pytest.mark.slow),
        ("parameter_server", "--gloo"),
    ],
)
def test_strategies_train_on_two_nodes(cluster: Cluster, strategy: str, controller: str) -> None:
    command = [*TRAIN, "--strategy", strategy, *LEARNING]
    outcome = cluster.run("a", "horovodrun", controller, "-np", "4", "-H", "a:2,b:2", *command)
    assert_quiet(outcome)
    assert "4 ranks on a: 2, b: 2" in outcome.output
    assert "evaluated 297/297" in outcome.output


def test_parameter_servers_listen_on_the_clusters_network_and_show_no_token(cluster: Cluster) -> None:
    outcomes: list[Outcome] = []
    command = ["env", "TRAINER_PARAMETER_SERVERS=2", "horovodrun", "-np", "2", "-H", "a:1,b:1", *TRAIN]
    job = threading.Thread(
        target=lambda: outcomes.append(
            cluster.run("a", *command, "--epochs", "60", "--strategy", "parameter_server", timeout_s=120)
        )
    )
    job.start()
    try:
        for node in ("a", "b"):
            deadline = time.monotonic() + 60
            while not (servers := cluster.shell(node, "pgrep -af parameter_server/server.py | grep -v pgrep")):
                assert time.monotonic() < deadline, "no server was started here"
                assert job.is_alive()
                time.sleep(0.3)
            assert re.fullmatch(r"\d+ \S*python\S* \S+/server\.py", servers.strip()), servers
            listening = cluster.run(node, "python", "-c", LISTENING, servers.split()[0]).output.split()
            assert listening == [cluster.shell(node, "hostname -i").strip()]
    finally:
        job.join()
    assert outcomes[0].code == 0, outcomes[0].output
    assert "2 parameter servers over gRPC" in outcomes[0].output

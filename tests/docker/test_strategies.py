"""Our own strategies and the communication benchmark, across two nodes."""

from __future__ import annotations

import json
import re
import threading
import time

import pytest

from tests.distributed.test_language_model import OPTIONS, losses_in
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


@pytest.mark.slow
def test_the_port_of_a_transformer_has_the_losses_of_plain_pytorch_across_two_nodes(cluster: Cluster) -> None:
    plain = cluster.run("a", "python", "examples/language_model_plain.py", *OPTIONS)
    ported = cluster.run(
        "a", "horovodrun", "-np", "4", "-H", "a:2,b:2", "python", "examples/language_model.py", *OPTIONS
    )
    assert_quiet(ported)
    assert losses_in(ported.output) == pytest.approx(losses_in(plain.output), rel=1e-5)


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


def test_the_communication_benchmark_runs_on_two_nodes(cluster: Cluster) -> None:
    bench = ["python", "scripts/comm_bench.py", "--sizes", "4", "2K", "1M", "--repeats", "1"]
    outcome = cluster.run(
        "a", "horovodrun", "-np", "4", "-H", "a:2,b:2", *bench, "--json", "runs/comm.json", "--plot", "runs/comm.png"
    )
    assert outcome.code == 0, outcome.output
    assert "ranks: 4 on a: 2, b: 2" in outcome.output
    rows = json.loads(cluster.shell("a", "cat runs/comm.json"))["rows"]
    names = ["MPI", "ring (trainer)", "Gloo", "parameter server (trainer)", "Horovod over MPI"]
    assert list(dict.fromkeys(entry["transport"] for entry in rows)) == names
    assert [entry["wrong"] for entry in rows] == [0] * len(rows)
    assert cluster.shell("a", "head -c 4 runs/comm.png | tail -c 3") == "PNG"


@pytest.mark.slow  # as the documentation's own commands do
def test_the_scaling_test_runs_on_two_nodes(cluster: Cluster) -> None:
    command = ["python", "scripts/scaling_test.py", "--hosts", "a:2,b:2", "--try-advice"]
    command += ["--scaling", "weak", "--steps", "8", "--repeats", "1", "--batch-size", "40", "--output", "runs/scaling"]
    script = ["examples/mnist.py", "--dataset", "digits", "--epochs", "1", "--output", "none"]
    outcome = cluster.run("a", *command, *script, timeout_s=280)
    assert outcome.code == 0, outcome.output
    written = json.loads(cluster.shell("a", "cat runs/scaling/scaling.json"))
    shapes = [(row["shape"]["hosts"], row["shape"]["per_host"], row["strategy"]) for row in written["rows"]]
    assert shapes == [(1, 1, "single"), (1, 2, "horovod"), (2, 1, "horovod"), (2, 2, "horovod")]
    hosts = {run["shape"]: run["timing"]["hosts"] for run in written["runs"]}
    assert hosts == {"1x1": ["a"], "1x2": ["a", "a"], "2x1": ["a", "b"], "2x2": ["a", "a", "b", "b"]}
    assert all(run["timing"]["machines"] == 1 for run in written["runs"])
    for network in written["networks"].values():
        for link in (network["local"], network["remote"]):
            assert len(link["points"]) == 6
            assert all(seconds > 0 for _, seconds in link["points"])
    assert {guess["shape"]["hosts"] for guess in written["larger"]} == {4, 8, 32}
    assert "2x2 under horovod: efficiency" in outcome.output
    assert "scaling.html" in cluster.shell("b", "ls runs/scaling")

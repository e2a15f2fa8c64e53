"""What goes wrong on clusters, done on purpose: each ends in bounded time, with one clear line, and nothing left."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import threading
import time
from collections.abc import Callable

import pytest

from tests.docker.cluster import ROOT, Cluster, Outcome, succeed

TRAIN = ["python", "examples/mnist.py", "--dataset", "digits", "--epochs", "10000"]
# How Open MPI, Horovod and ssh name the node that has gone; which of them is first is chance.
NAMES_B = re.compile(r"(on node |on host |host |[Hh]ost: +|Remote daemon:.*|Connection to )b\b")
TRAINING = re.compile(r"epoch \d+/10000")
# Over Gloo, on one host, tests/distributed does the same to a job.
each_controller = pytest.mark.parametrize("controller", ["--mpi", pytest.param("--gloo", marks=pytest.mark.slow)])


def horovodrun(*options: str) -> list[str]:
    return ["horovodrun", *options, "-np", "4", "-H", "a:2,b:2"]


def during_training(cluster: Cluster, command: list[str], strike: Callable[[], object]) -> Outcome:
    """Starts a job on node a, waits until it trains, strikes, and waits for its end."""
    outcomes: list[Outcome] = []
    log = "/tmp/job.log"  # noqa: S108 (in the container)
    script = f"{' '.join(command)} > {log} 2>&1; code=$?; cat {log}; exit $code"
    cluster.shell("a", f"rm -f {log}")
    job = threading.Thread(target=lambda: outcomes.append(cluster.run("a", "bash", "-c", script)), daemon=True)
    job.start()
    deadline = time.monotonic() + 90
    while not TRAINING.search(seen := cluster.shell("a", f"cat {log} 2>/dev/null")):
        assert job.is_alive(), f"it never trained:\n{seen}"
        assert time.monotonic() < deadline, f"it does not begin to train:\n{seen}"
        time.sleep(0.5)
    strike()
    job.join(timeout=90)
    assert outcomes, f"the job did not end:\n{cluster.shell('a', f'tail -c 3000 {log}; ps axf')}"
    return outcomes[0]


def test_a_node_that_is_not_up_yet_is_waited_for(own_cluster: Cluster) -> None:
    own_cluster.up()
    own_cluster.compose("stop", "--timeout", "1", "b")
    outcome = own_cluster.run("a", *horovodrun("--start-timeout", "5"), "hostname")
    assert outcome.code == 1
    why, doctor = (line for line in outcome.output.splitlines() if line.startswith("horovodrun: "))
    assert "cannot log in to host b" in why
    assert "`trainer doctor -H " in doctor
    late = threading.Timer(4, lambda: own_cluster.compose("start", "b"))
    late.start()
    outcome = own_cluster.run("a", *horovodrun(), "hostname")
    late.join()
    assert outcome.code == 0, outcome.output
    assert len(re.findall(r"[ab]$", outcome.output, re.MULTILINE)) == 4


@each_controller
def test_a_node_dies_during_training(own_cluster: Cluster, controller: str) -> None:
    own_cluster.up()
    victim = own_cluster.container("b")
    outcome = during_training(
        own_cluster, [*horovodrun(controller), *TRAIN], lambda: succeed(["docker", "kill", victim])
    )
    assert outcome.code != 0
    assert NAMES_B.search(outcome.output), outcome.output[-3000:]
    assert own_cluster.left_over("a") == ""


@each_controller
def test_the_network_is_cut_during_training(own_cluster: Cluster, controller: str) -> None:
    """What a node that loses its power looks like to the other: no connection is closed, nothing answers."""
    own_cluster.up()
    cut = ["docker", "network", "disconnect", own_cluster.network, own_cluster.container("b")]
    outcome = during_training(own_cluster, [*horovodrun(controller), *TRAIN], lambda: succeed(cut))
    assert outcome.code != 0
    assert NAMES_B.search(outcome.output), outcome.output[-3000:]
    assert own_cluster.left_over("a") == ""
    assert own_cluster.left_over("b", within_s=60) == ""


@each_controller
def test_a_rank_is_killed(cluster: Cluster, controller: str) -> None:
    kill = "pkill -KILL -o -f '^python examples/mnist.py'"
    outcome = during_training(cluster, [*horovodrun(controller), *TRAIN], lambda: cluster.shell("b", kill))
    assert outcome.code != 0
    assert re.search(r"on (node |host )?b\b", outcome.output), outcome.output[-3000:]
    assert cluster.left_over("a") == ""
    assert cluster.left_over("b") == ""


@each_controller
def test_ctrl_c_ends_all_ranks_on_all_hosts(cluster: Cluster, controller: str) -> None:
    terminal, inside = pty.openpty()
    command = ["docker", "exec", "-it", cluster.container("a"), *horovodrun(controller), *TRAIN]
    with subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, cwd=ROOT) as job:
        os.close(inside)
        seen = b""
        while not TRAINING.search(seen.decode(errors="replace")):
            seen += os.read(terminal, 4096)
        said: list[bytes] = []
        drain = threading.Thread(target=_drain, args=(terminal, said), daemon=True)
        drain.start()
        os.write(terminal, b"\x03")
        assert job.wait(timeout=30) == 130
        drain.join()
    # Beside it, a rank may tell that a rank of the other host has gone, and Open MPI's libevent that a socket has.
    after = b"".join(said).rpartition(b"^C")[2]
    assert [line.strip() for line in after.split(b"\n")].count(b"horovodrun: interrupted") == 1, after
    assert cluster.left_over("a") == ""
    assert cluster.left_over("b") == ""


def _drain(terminal: int, said: list[bytes]) -> None:
    try:
        while some := os.read(terminal, 4096):
            said.append(some)
    except OSError:
        pass  # the other end has been closed
    os.close(terminal)


@each_controller
def test_a_killed_client_takes_its_job_along(cluster: Cluster, controller: str) -> None:
    """No signal of a client without a terminal arrives in the container, but its stdin ends there."""
    command = [*cluster.exec("a"), "sh", "-c", f"exec {' '.join([*horovodrun(controller), *TRAIN])}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as client:
        assert client.stdout is not None
        while not TRAINING.search(client.stdout.readline()):
            assert client.poll() is None, "it never trained"
        client.kill()
        assert cluster.left_over("a") == ""  # while the client's own stdin is still open
        assert cluster.left_over("b") == ""


def test_a_node_ends_on_sigterm_and_reaps_zombies(own_cluster: Cluster) -> None:
    own_cluster.up("b")
    own_cluster.shell("b", "setsid bash -c 'sleep 0.1 & exec sleep 0.3' > /dev/null 2>&1 & sleep 1")
    assert "Z" not in own_cluster.shell("b", "ps -eo stat --no-headers")
    container = own_cluster.container("b")
    succeed(["docker", "stop", container])
    # 137 would be the engine's SIGKILL, after ten seconds in which the node ignored SIGTERM.
    assert succeed(["docker", "inspect", "--format", "{{.State.ExitCode}}", container]).strip() != "137"

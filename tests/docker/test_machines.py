"""Two machines that share nothing, as docs/cluster.md sets them up.

Node a is on this machine's own network, with docker0 and all other interfaces. Node b is behind an address of another
network, with another interface name.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.docker.cluster import IMAGE, ROOT, Cluster, run, succeed
from tests.docker.test_shapes import WHO, assert_quiet, ranks_per_host

SUBNET, ADDRESS_A, ADDRESS_B = "10.231.7.0/24", "10.231.7.1", "10.231.7.2"
PORT = "2322"


@pytest.fixture
def machine_a(image: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Node a, and beside it node b with keys that came through the documented pipe."""
    project = f"trainer-test-machines-{os.getpid()}"
    for name, value in (("NODE", "a"), ("ADDRESS_A", ADDRESS_A), ("ADDRESS_B", ADDRESS_B), ("SSH_PORT", PORT)):
        monkeypatch.setenv(name, value)
    machine = Cluster(project, "docker-compose.host.yml")
    names = {"network": f"{project}-net", "node": f"{project}-b", "volume": f"{project}-b"}
    own = ["--volume", f"{names['volume']}:/cluster", "--env", "TRAINER_NODE=b", "--env", f"TRAINER_SSH_PORT={PORT}"]
    try:
        succeed(["docker", "network", "create", "--subnet", SUBNET, names["network"]])
        one_off = ["run", "--rm", "-T", "node", "trainer-node", "keys"]
        assert "keys for a, b are in /cluster" in machine.compose(*one_off, "create", "a", "b")
        command = ["docker", "compose", "-p", project, "-f", "docker-compose.host.yml", *one_off, "export", "b"]
        part = subprocess.run(command, capture_output=True, cwd=ROOT, check=True).stdout
        importing = ["docker", "run", "--rm", "-i", *own, IMAGE, "trainer-node", "keys", "import"]
        assert b"keys for node b" in subprocess.run(importing, input=part, capture_output=True, check=True).stdout
        place = ["--network", names["network"], "--ip", ADDRESS_B, "--hostname", "b", "--add-host", f"a:{ADDRESS_A}"]
        succeed(["docker", "run", "--detach", "--name", names["node"], "--shm-size", "1g", *place, *own, IMAGE])
        machine.up()
        yield machine
    finally:
        machine.down()
        run(["docker", "rm", "--force", names["node"]])
        run(["docker", "volume", "rm", names["volume"]])
        run(["docker", "network", "rm", names["network"]])


@pytest.mark.parametrize("controller", ["--mpi", "--gloo"])
def test_two_machines_train_over_the_network_between_them(machine_a: Cluster, controller: str) -> None:
    outcome = machine_a.run("node", "horovodrun", controller, "-np", "4", "-H", "a:2,b:2", "python", "-c", WHO)
    assert_quiet(outcome)
    # On its machine's own network, node a has the machine's own host name.
    assert sorted(ranks_per_host(outcome).values()) == [2, 2]
    # sshd is on the way to the other machine and on no other address of this one.
    listening = machine_a.shell("node", "cat ~/.ssh/sshd_config")
    assert f"ListenAddress {ADDRESS_A}\n" in listening


def test_a_name_that_is_missing_is_asked_for() -> None:
    outcome = run(
        ["docker", "compose", "-f", "docker-compose.host.yml", "config"],
        env={"NODE": "", "ADDRESS_A": ADDRESS_A, "ADDRESS_B": ADDRESS_B},
    )
    assert outcome.code != 0
    assert "NODE is missing a value: is this machine's name in horovodrun -H" in " ".join(outcome.output.split())

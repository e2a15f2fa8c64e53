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

PORT = "2322"
NOWHERE = "192.0.2.1"


@pytest.fixture
def machine_a(image: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Node a, and beside it node b with keys that came through the documented pipe."""
    project = f"trainer-test-machines-{os.getpid()}"
    name = f"{project}-b"  # of the network, of node b and of its volume
    machine = Cluster(project, "docker-compose.host.yml")
    own = ["--volume", f"{name}:/cluster", "--env", "TRAINER_NODE=b", "--env", f"TRAINER_SSH_PORT={PORT}"]
    succeed(["docker", "network", "create", name])  # on addresses that this machine has free
    gateway = ["docker", "network", "inspect", "--format", "{{(index .IPAM.Config 0).Gateway}}", name]
    address_a = succeed(gateway).strip()
    # Node b has its address from when it runs.
    for variable, value in (("NODE", "a"), ("ADDRESS_A", address_a), ("ADDRESS_B", NOWHERE), ("SSH_PORT", PORT)):
        monkeypatch.setenv(variable, value)
    try:
        one_off = ["run", "--rm", "-T", "node", "trainer-node", "keys"]
        assert "keys for a, b are in /cluster" in machine.compose(*one_off, "create", "a", "b")
        command = ["docker", "compose", "-p", project, "-f", "docker-compose.host.yml", *one_off, "export", "b"]
        part = subprocess.run(command, capture_output=True, cwd=ROOT, check=True).stdout
        importing = ["docker", "run", "--rm", "-i", *own, IMAGE, "trainer-node", "keys", "import"]
        assert b"keys for node b" in subprocess.run(importing, input=part, capture_output=True, check=True).stdout
        place = ["--network", name, "--hostname", "b", "--add-host", f"a:{address_a}"]
        succeed(["docker", "run", "--detach", "--name", name, "--shm-size", "1g", *place, *own, IMAGE])
        address = ["docker", "inspect", "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", name]
        monkeypatch.setenv("ADDRESS_B", succeed(address).strip())
        machine.up()
        yield machine
    finally:
        machine.down()
        run(["docker", "rm", "--force", name])
        run(["docker", "volume", "rm", name])
        run(["docker", "network", "rm", name])


@pytest.mark.parametrize("controller", ["--mpi", "--gloo"])
def test_two_machines_train_over_the_network_between_them(machine_a: Cluster, controller: str) -> None:
    outcome = machine_a.run("node", "horovodrun", controller, "-np", "4", "-H", "a:2,b:2", "python", "-c", WHO)
    assert_quiet(outcome)
    # On its machine's own network, node a has the machine's own host name.
    assert sorted(ranks_per_host(outcome).values()) == [2, 2]
    # sshd is on the way to the other machine and on no other address of this one.
    listening = machine_a.shell("node", "cat ~/.ssh/sshd_config")
    assert f"ListenAddress {os.environ['ADDRESS_A']}\n" in listening


def test_a_name_that_is_missing_is_asked_for() -> None:
    outcome = run(
        ["docker", "compose", "-f", "docker-compose.host.yml", "config"],
        env={"NODE": "", "ADDRESS_A": NOWHERE, "ADDRESS_B": NOWHERE},
    )
    assert outcome.code != 0
    assert "NODE is missing a value: is this machine's name in horovodrun -H" in " ".join(outcome.output.split())

"""The image's SBOM names what is in it, and its node listens with sshd alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.docker.cluster import IMAGE, run, succeed

Component = dict[str, Any]


def inside(*command: str) -> str:
    """Return what a command prints in a container of the image."""
    return succeed(["docker", "run", "--rm", "--entrypoint", command[0], IMAGE, *command[1:]])


@pytest.fixture(scope="module")
def components(image: str) -> list[Component]:
    """The parts that the image's SBOM names."""
    sbom = json.loads(inside("cat", "/usr/share/doc/trainer/sbom.json"))
    assert sbom["metadata"]["component"]["name"] == "trainer"
    parts: list[Component] = sbom["components"]
    return parts


def test_the_sbom_names_every_python_package(components: list[Component]) -> None:
    listed = json.loads(inside("pip", "list", "--format", "json"))
    named = {
        (part["name"], part["version"])
        for part in components
        if part["type"] == "library" and "pkg:deb/" not in str(part.get("purl"))
    }
    assert named == {(package["name"], package["version"]) for package in listed}


def test_a_node_listens_with_sshd_alone(image: str) -> None:
    node = succeed(["docker", "run", "--detach", "--cap-drop", "ALL", image]).strip()
    try:
        succeed(
            ["docker", "exec", node, "sh", "-c", "for _ in $(seq 60); do trainer-node health && exit; sleep 1; done"]
        )
        # A socket that waits for a peer has state 0A over TCP and 07 over UDP; the address ends with the port.
        find = ["awk", '$4 == "0A" || $4 == "07" {split($2, address, ":"); print address[2]}']
        tables = [f"/proc/net/{kind}" for kind in ("tcp", "tcp6", "udp", "udp6")]
        ports = succeed(["docker", "exec", node, *find, *tables]).split()
    finally:
        run(["docker", "rm", "--force", "--volumes", node])
    assert [int(port, 16) for port in ports] == [2222]

"""The image's SBOM names what is in it, its labels say where it comes from, and its node listens with sshd alone."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from typing import Any

import horovod_wheel
import pytest

from tests.distributed.harness import ROOT
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


def test_the_sbom_says_what_horovod_was_compiled_from(components: list[Component]) -> None:
    horovod = next(part for part in components if part["name"] == "horovod")
    patched = [patch["diff"]["url"] for patch in horovod["pedigree"]["patches"]]
    listed = subprocess.check_output(["git", "ls-files", "--", "."], cwd=horovod_wheel.CHANGES, text=True).splitlines()
    assert sorted(patched) == sorted(f"third_party/horovod/{name}" for name in listed if name.endswith(".patch"))
    properties = {(each["name"], each["value"]) for each in horovod["properties"]}
    hashes = {
        (f"trainer:change:{name}", f"sha256:{digest((horovod_wheel.CHANGES / name).read_bytes())}")
        for name in set(listed) - {"README.md"}
    }
    assert {each for each in properties if each[0] != "trainer:compiler"} == hashes
    (source,) = horovod["pedigree"]["ancestors"]
    assert source["hashes"][0]["content"] in horovod_wheel.PIN.read_text()
    (library,) = (part for part in horovod["components"] if part["type"] == "file")
    summed = inside("sh", "-c", "sha256sum /opt/venv/lib/python3*/site-packages/horovod/torch/mpi_lib_v2*.so")
    assert summed.split()[0] == library["hashes"][0]["content"]


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_labels_say_where_the_image_comes_from(image: str) -> None:
    labels = json.loads(succeed(["docker", "image", "inspect", "--format", "{{json .Config.Labels}}", image]))
    ours = {name.removeprefix("org.opencontainers.image."): value for name, value in labels.items()}
    base = os.environ.get("BASE")
    if base:
        assert (ours["base.name"], ours["base.digest"]) == (base, "unknown")
    else:
        assert ours["base.name"] == "docker.io/library/debian:bookworm-slim"
        assert f"ARG DEBIAN_DIGEST={ours['base.digest']}\n" in (ROOT / "Dockerfile").read_text()
    assert {"source", "revision", "created"} <= ours.keys()


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

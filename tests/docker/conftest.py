"""One image and one two-node cluster for all tests of this folder, which are marked `docker`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.cluster import BUILD_TIMEOUT_S, IMAGE, Cluster, run, succeed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.docker)
            item.add_marker(pytest.mark.needs("docker"))


@pytest.fixture(scope="session")
def image() -> str:
    """The CPU image, built by the README's own command, on BASE where the environment names one."""
    command = ["docker", "build", "-t", IMAGE, ".", "--build-arg", "BASE"]
    succeed(command, timeout_s=BUILD_TIMEOUT_S, env={"DOCKER_BUILDKIT": "1"})
    return IMAGE


@pytest.fixture(scope="session")
def _cluster(image: str) -> Iterator[Cluster]:
    cluster = Cluster(f"trainer-test-{os.getpid()}")
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


@pytest.fixture
def cluster(_cluster: Cluster) -> Iterator[Cluster]:
    """Nodes a and b, up; whatever a test did to them, the next one finds them so again."""
    _cluster.up()
    yield _cluster
    for node in ("a", "b"):
        left = (
            _cluster.left_over(node, within_s=30)
            if run(["docker", "exec", _cluster.container(node), "true"]).code == 0  # a node that was killed has none
            else ""
        )
        assert not left, f"the test left processes on node {node}:\n{left}"


@pytest.fixture
def own_cluster(image: str) -> Iterator[Cluster]:
    """A cluster for one test that breaks it; not up yet."""
    cluster = Cluster(f"trainer-test-own-{os.getpid()}")
    try:
        yield cluster
    finally:
        cluster.down()


@pytest.fixture
def stranger(cluster: Cluster) -> Iterator[str]:
    """A container of the same image on the cluster's network, without its keys: its name."""
    name = f"{cluster.project}-stranger"
    subprocess.run(["docker", "rm", "--force", name], capture_output=True, check=False)
    succeed(
        ["docker", "run", "--detach", "--name", name, "--network", cluster.network, "--hostname", "stranger", IMAGE]
    )
    try:
        # Until it has keys of its own to try.
        succeed(["docker", "exec", name, "sh", "-c", "until [ -f ~/.ssh/config ]; do sleep 0.2; done"], timeout_s=30)
        yield name
    finally:
        subprocess.run(["docker", "rm", "--force", "--volumes", name], capture_output=True, check=False)

"""README.md and docs/: the commands and the YAML blocks that need containers, at the smallest size."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.documentation import BY_DOCKER, ON_NODE_A, Unit, units
from tests.docker.cluster import ROOT, Cluster, run, succeed

RUN, WITH_CODE, WITH_GPUS, WITH_DATA = BY_DOCKER
HOST_ENV = {"NODE": "a", "ADDRESS_A": "10.0.0.1", "ADDRESS_B": "10.0.0.2"}


@pytest.mark.parametrize("command", ON_NODE_A)
def test_commands_run_on_a_node(cluster: Cluster, command: str) -> None:
    small = ON_NODE_A[command]
    outcome = cluster.run("a", "bash", "-c", small.small(command), timeout_s=280)
    assert outcome.code == 0, outcome.output
    assert small.prints in outcome.output


def test_one_container_needs_no_cluster(image: str) -> None:
    output = succeed([*shlex.split(RUN), "--dataset", "digits", "--epochs", "1"], timeout_s=180)
    assert "evaluated 297/297" in output


@pytest.fixture
def project() -> Iterator[dict[str, str]]:
    """The environment in which a documented `docker compose` has a project of its own, removed afterwards."""
    env = {"COMPOSE_PROJECT_NAME": f"trainer-test-documentation-{os.getpid()}"}
    yield env
    succeed(["docker", "compose", "down", "--volumes", "--timeout", "2"], env=env)


def test_a_checkouts_code_is_mounted(image: str, project: dict[str, str]) -> None:
    succeed([*shlex.split(WITH_CODE), "--wait"], timeout_s=180, env=project)
    mounted = ["docker", "compose", "exec", "-T", "b", "cat", "project/mnist.py", "trainer/trainer.py"]
    expected = (ROOT / "examples/mnist.py").read_text() + (ROOT / "trainer/trainer.py").read_text()
    assert succeed(mounted, env=project) == expected


def test_a_folder_with_data_is_mounted(image: str, project: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "mark").touch()
    tmp_path.chmod(0o755)
    command = WITH_DATA.replace("/path/to/data", str(tmp_path))
    succeed(["sh", "-c", f"{command} --wait"], timeout_s=180, env=project)
    assert succeed(["docker", "compose", "exec", "-T", "a", "ls", "data"], env=project) == "mark\n"


def test_the_files_for_gpus_fit_together() -> None:
    """Starting them needs GPUs."""
    files = shlex.split(WITH_GPUS.removesuffix("up --build -d"))
    services = json.loads(succeed([*files, "config", "--format", "json"]))["services"]
    devices = [services[node]["deploy"]["resources"]["reservations"]["devices"][0] for node in ("a", "b")]
    assert [one["device_ids"] for one in devices] == [["0", "1"], ["2", "3"]]
    assert {services[node]["image"] for node in ("a", "b")} == {"trainer:gpu"}


@pytest.mark.parametrize("unit", units("yaml"), ids=str)
def test_yaml_blocks_are_what_compose_takes(unit: Unit, tmp_path: Path) -> None:
    if unit.text.startswith("services:"):  # a file of the user's own, behind a second -f
        override = tmp_path / "own.yml"
        override.write_text(unit.text)
        files = ["-f", "docker-compose.host.yml", "-f", str(override)]
        node = json.loads(succeed(["docker", "compose", *files, "config", "--format", "json"], env=HOST_ENV))
        assert node["services"]["node"]["deploy"]["resources"]["reservations"]["devices"][0]["driver"] == "nvidia"
        assert node["services"]["node"]["network_mode"] == "host"
        return
    original = (ROOT / "docker-compose.yml").read_text()
    extended = tmp_path / "docker-compose.yml"
    extended.write_text(original.replace("\nvolumes:\n", f"{unit.text}\n\nvolumes:\n"))
    command = ["docker", "compose", "--project-directory", str(ROOT), "-f", str(extended), "config", "--format", "json"]
    services = json.loads(succeed(command))["services"]
    assert set(services) == {"a", "b", "c"}
    built_by_b = {"build", "hostname"}
    assert services["c"] == {key: value for key, value in services["b"].items() if key not in built_by_b} | {
        "hostname": "c"
    }


def test_the_documented_environment_file_is_read(tmp_path: Path) -> None:
    """The `printf` of docs/cluster.md makes what docker-compose.host.yml reads."""
    written = next(unit.text for unit in units("command") if unit.text.startswith("printf "))
    assert run(["sh", "-c", f"cd {tmp_path} && {written}"]).code == 0
    command = ["docker", "compose", "--env-file", str(tmp_path / ".env"), "-f", "docker-compose.host.yml", "config"]
    assert "- a=10.0.0.1\n" in succeed(command)

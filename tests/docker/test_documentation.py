"""What README.md and docs/ say of containers: commands and YAML blocks, at the smallest size."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.distributed.pages import units
from tests.docker.cluster import ROOT, run, succeed

RUN = "docker run --rm trainer:cpu python examples/mnist.py"
WITH_CODE = "docker compose -f docker-compose.yml -f docker-compose.dev.yml up -d"
WITH_IMAGE = (
    "PROJECT_DIR=/path/to/project docker compose -f docker-compose.yml -f docker-compose.project.yml up --build -d"
)
TRAIN = "horovodrun -np 4 -H a:2,b:2 python project/train.py"
_ON_NODE = "--nproc-per-node 2 --master-addr a --master-port 29500 project/train.py"
TORCHRUN_ON_B = f"docker compose exec -d b torchrun --nnodes 2 --node-rank 1 {_ON_NODE}"
TORCHRUN = f"torchrun --nnodes 2 --node-rank 0 {_ON_NODE}"


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
    mounted = ["docker", "compose", "exec", "-T", "b", "cat", "project/mnist.py", "trainer/fit/trainer.py"]
    expected = (ROOT / "examples/mnist.py").read_text() + (ROOT / "trainer/fit/trainer.py").read_text()
    assert succeed(mounted, env=project) == expected


@pytest.fixture
def own_project(tmp_path: Path) -> Path:
    """A folder with README.md's script and the documented Dockerfile, under a strict umask."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(next(unit.text for unit in units("python") if unit.page == "README.md"))
    (dockerfile,) = units("dockerfile")
    (folder / "Dockerfile").write_text(dockerfile.text)
    (folder / "train.py").chmod(0o600)
    return folder


@pytest.fixture
def own_image(image: str, project: dict[str, str]) -> Iterator[dict[str, str]]:
    """The environment of `project`, with a name for an image that is removed after the nodes have gone."""
    name = project["COMPOSE_PROJECT_NAME"]
    yield project | {"PROJECT_IMAGE": name}
    succeed(["docker", "compose", "down", "--timeout", "2"], env=project)
    run(["docker", "rmi", name])


def on_a(command: str, env: Mapping[str, str]) -> str:
    return succeed(["docker", "compose", "exec", "-T", "a", *shlex.split(command)], env=env)


def test_a_project_trains_in_an_image_of_its_own(own_image: dict[str, str], own_project: Path) -> None:
    command = WITH_IMAGE.replace("/path/to/project", str(own_project))
    succeed(["sh", "-c", f"{command} --wait"], timeout_s=280, env=own_image)
    assert "epoch 5/5" in on_a(TRAIN, own_image)
    on_a("python -c 'import einops'", own_image)
    succeed(shlex.split(TORCHRUN_ON_B), env=own_image)
    output = on_a(TORCHRUN, own_image)
    assert "trainer: 4 ranks on a: 2, b: 2; DDP over Gloo" in output
    assert "epoch 5/5" in output, "rank 0 is on node 0"


def test_a_folder_that_cannot_be_written_is_named(image: str) -> None:
    (line,) = (unit.text for unit in units("text") if "cannot be written" in unit.text)
    train = ["python", "examples/mnist.py", "--dataset", "digits", "--epochs", "1", "--output", "results"]
    outcome = run(["docker", "run", "--rm", image, *train])
    assert outcome.code == 1
    assert outcome.output.splitlines()[-1] == line

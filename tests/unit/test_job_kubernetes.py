"""Job files for Kubernetes: strictly valid by the published CRDs, and what they start."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.requirements import CRDS
from tests.unit.crds import load, problems
from tests.unit.job_files import JOBS, stand_in

NAMES = ("mpijob", "trainjob", "jobset")
needs_crds = pytest.mark.needs("crds")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((JOBS / f"{name}.yaml").read_text()))


@cache
def crds() -> list[dict[str, Any]]:
    return [load(path) for path in sorted(CRDS.glob("*.yaml.gz"))]


@needs_crds
@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_is_strictly_valid(name: str) -> None:
    for document in documents(name):
        assert problems(document, crds()) == []


def containers(name: str) -> dict[str, dict[str, Any]]:
    """The containers that a manifest starts, by name."""
    *_, job = documents(name)
    spec = job["spec"]
    if name == "mpijob":
        pods = [replicas["template"]["spec"] for replicas in spec["mpiReplicaSpecs"].values()]
    elif name == "jobset":
        pods = [spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]]
    else:
        pods = [{"containers": [{"name": "trainer", **spec["trainer"]}]}]
    return {container["name"]: container for pod in pods for container in pod["containers"]}


def test_a_jobset_is_not_started_again_after_its_time_limit() -> None:
    (job,) = documents("jobset")
    assert job["spec"]["replicatedJobs"][0]["template"]["spec"]["activeDeadlineSeconds"] == 7200
    (rule,) = job["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["DeadlineExceeded"])


def test_the_launchers_script_pins_the_operators_key(tmp_path: Path) -> None:
    script = containers("mpijob")["launcher"]["args"][0]
    hostfile, keys = tmp_path / "hostfile", tmp_path / "ssh"
    hostfile.write_text("train-worker-0.train.default.svc slots=4\ntrain-worker-1.train.default.svc slots=4\n")
    keys.mkdir()
    (keys / "id_rsa.pub").write_text("ecdsa-sha2-nistp521 AAAA\n")
    stand_in(tmp_path, "trainer", 'printf "%s\\n" "$@"')
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    script = script.replace("/etc/mpi/hostfile", str(hostfile)).replace("/ssh/id_rsa", str(keys / "id_rsa"))
    done = subprocess.run(
        ["bash", "-c", script, "launcher", "python", "a b"], env=env, capture_output=True, text=True, check=True
    )
    hosts = "train-worker-0.train.default.svc:4,train-worker-1.train.default.svc:4"
    options = ["run", "--mpi", "-np", "4", "-H", hosts, "--name", "mnist", "--"]
    assert done.stdout.splitlines() == [*options, "python", "a b"]
    assert (tmp_path / ".ssh/known_hosts").read_text() == "* ecdsa-sha2-nistp521 AAAA\n"
    assert "Port 2222\n" in (tmp_path / ".ssh/config").read_text()


def pods(value: Any) -> list[dict[str, Any]]:
    """The specifications of pods in a manifest."""
    if isinstance(value, list):
        return [pod for item in value for pod in pods(item)]
    if not isinstance(value, dict):
        return []
    this = [value] if "terminationGracePeriodSeconds" in value else []
    return this + [pod for item in value.values() for pod in pods(item)]


@pytest.mark.parametrize("name", NAMES)
def test_every_pod_is_an_ordinary_user_without_capabilities(name: str) -> None:
    specs = pods(documents(name))
    assert len(specs) == (2 if name == "mpijob" else 1)
    for pod in specs:
        assert pod["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["containers"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_torchrun_leaves_the_scripts_options_alone() -> None:
    assert containers("trainjob")["trainer"]["command"] == ["tini", "--", "torchrun", "--no-python", "--"]
    assert '--no-python -- "$@"' in containers("jobset")["node"]["args"][0]

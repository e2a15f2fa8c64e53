"""The containers of the job files for Kubernetes, started as the manifests and the operators say."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.docker.cluster import Outcome
from tests.docker.pods import Pods
from tests.unit.job_files import JOBS

# What the MPI Operator makes: a key pair, and the hostfile of its launcher.
KEYS = "ssh-keygen -q -t ecdsa -b 521 -N '' -C '' -f id_rsa && cp id_rsa.pub authorized_keys"
WORKERS = [f"mnist-worker-{number}.mnist.default.svc" for number in range(2)]
OPERATOR_ENV = {
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
}


@pytest.fixture
def pods(image: str) -> Iterator[Pods]:
    pods = Pods(f"trainer-test-pods-{os.getpid()}")
    try:
        yield pods
    finally:
        pods.end()


def documents(name: str, image: str, epochs: int = 2) -> list[dict[str, Any]]:
    """A job file with an image, and a command, of the test's."""
    text = (JOBS / f"{name}.yaml").read_text()
    options = ["--dataset", "digits", "--epochs", str(epochs), "--output", "none", "--checkpoint-every", "5"]
    last = next(line for line in text.splitlines(keepends=True) if line.endswith("- runs/checkpoints\n"))
    added = "".join(last.replace("runs/checkpoints", json.dumps(word)) for word in options)
    return list(yaml.safe_load_all(text.replace(last, last + added).replace("trainer:cpu", image)))


def start_mpijob(pods: Pods, job: dict[str, Any], image: str) -> str:
    """Start the workers, then the launcher; return its name."""
    spec = job["spec"]
    pods.secret("ssh", image, KEYS)
    hosts = "".join(f"{worker} slots={spec['slotsPerWorker']}\\n" for worker in WORKERS)
    pods.secret("mpi", image, f"printf '{hosts}' > hostfile")
    worker = spec["mpiReplicaSpecs"]["Worker"]["template"]["spec"]
    keys = f"ssh:{spec['sshAuthMountPath']}"
    for host in WORKERS:
        pods.start(host, worker, worker["containers"][0], {}, [keys])
    launcher = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]
    return pods.start("mnist-launcher", launcher, launcher["containers"][0], OPERATOR_ENV, [keys, "mpi:/etc/mpi"])


def check(outcome: Outcome, words: str) -> None:
    assert outcome.code == 0, outcome.output
    assert words in outcome.output
    assert "test accuracy" in outcome.output


def test_an_mpijobs_containers_train(pods: Pods, image: str) -> None:
    (job,) = documents("mpijob", image)
    check(pods.wait(start_mpijob(pods, job, image)), "Horovod over MPI, rank 0 of 4")


def test_a_jobsets_containers_train(pods: Pods, image: str) -> None:
    (job,) = documents("jobset", image)
    pod = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    names = [
        pods.start(f"mnist-node-0-{index}.mnist", pod, pod["containers"][0], {"JOB_COMPLETION_INDEX": str(index)})
        for index in range(2)
    ]
    first, second = (pods.wait(name) for name in names)
    check(first, "rank 0 of 4")
    assert second.code == 0, second.output


def test_a_trainjobs_containers_train(pods: Pods, image: str) -> None:
    runtime, job = documents("trainjob", image)
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    trainer = job["spec"]["trainer"]
    container = {**pod["containers"][0], **{field: trainer[field] for field in ("image", "command", "args")}}
    names = []
    for index in range(2):
        # What Kubeflow Trainer's plugin for torch sets.
        env = {
            "PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(index), "PET_MASTER_ADDR": "mnist-node-0-0.mnist", "PET_MASTER_PORT": "29400",
        }  # fmt: skip
        names.append(pods.start(f"mnist-node-0-{index}.mnist", pod, container, env))
    first, second = (pods.wait(name) for name in names)
    check(first, "rank 0 of 4")
    assert second.code == 0, second.output

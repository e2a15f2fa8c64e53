"""Job files for Kubernetes: strictly valid by the published CRDs, and what they start."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.requirements import CRDS
from tests.unit.crds import load, problems
from tests.unit.job_files import render, stand_in
from trainer.cli import main
from trainer.errors import ConfigError
from trainer.ops.submit.schedulers import SCHEDULERS

NAMES = ("mpijob", "trainjob", "jobset")
NODES = ["--nodes", "2", "--ranks-per-node", "4", "--image", "trainer:cpu"]
FULL = ["--time", "2h", "--memory", "16GB", "--cpus-per-rank", "2", "--gpus-per-node", "4", "--claim", "runs"]
WHERE = [
    "--namespace",
    "team",
    "--node-selector",
    "example.com/gpu=h100",
    "--node-selector",
    "zone=1",
    "--toleration",
    "nvidia.com/gpu:NoSchedule",
    "--toleration",
    "for=training:NoExecute",
    "--toleration",
    "spot",
    "--pull-secret",
    "registry",
]
COMMAND = ["--", "python", "train.py", "--text", "it's $(HOME): {image} #1"]
needs_crds = pytest.mark.needs("crds")


def documents(*arguments: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(render(*arguments)))


@cache
def crds() -> list[dict[str, Any]]:
    return [load(path) for path in sorted(CRDS.glob("*.yaml.gz"))]


@needs_crds
@pytest.mark.parametrize("options", [[], [*FULL, *WHERE]], ids=["bare", "full"])
@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_is_strictly_valid(name: str, options: list[str]) -> None:
    for document in documents(name, *NODES, *options, *COMMAND):
        assert problems(document, crds()) == []


@needs_crds
def test_an_mpijob_has_what_the_operator_itself_checks() -> None:
    (job,) = documents("mpijob", *NODES, *COMMAND)
    spec = job["spec"]
    assert set(spec["mpiReplicaSpecs"]) == {"Launcher", "Worker"}
    assert spec["mpiReplicaSpecs"]["Launcher"]["replicas"] == 1
    assert spec["runPolicy"]["cleanPodPolicy"] in ("None", "Running", "All")
    assert spec["launcherCreationPolicy"] in ("AtStartup", "WaitForWorkersReady")
    for replicas in spec["mpiReplicaSpecs"].values():
        assert replicas["restartPolicy"] in ("Never", "OnFailure")
        assert len(replicas["template"]["spec"]["containers"]) == 1


@needs_crds
@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (
            ("spec", "slotsPerWorkers"),
            2,
            "spec: Additional properties are not allowed ('slotsPerWorkers' was unexpected)",
        ),
        (("spec", "slotsPerWorker"), "2", "spec.slotsPerWorker: '2' is not of type 'integer'"),
        (("spec", "mpiImplementation"), "OpenMpi", "'OpenMpi' is not one of ['OpenMPI', 'Intel', 'MPICH']"),
        (("spec", "mpiReplicaSpecs"), None, "None is not of type 'object'"),
        (("metadata", "nam"), "a", "metadata: Additional properties are not allowed ('nam' was unexpected)"),
    ],
)
def test_a_fault_in_an_mpijob_is_found(path: tuple[str, str], value: object, problem: str) -> None:
    (job,) = documents("mpijob", *NODES, *COMMAND)
    job[path[0]][path[1]] = value
    assert problem in "; ".join(problems(job, crds()))


@needs_crds
def test_rules_are_evaluated() -> None:
    runtime, job = documents("trainjob", *NODES, *COMMAND)
    job["metadata"]["name"] = "Train"
    job["spec"]["trainer"]["numProcPerNode"] = 0
    runtime["spec"]["mlPolicy"]["jax"] = {}
    said = "; ".join([*problems(job, crds()), *problems(runtime, crds())])
    assert "metadata.name must match RFC 1035" in said
    assert "numProcPerNode must be greater than or equal to 1" in said
    assert "spec.mlPolicy: " in said


@needs_crds
def test_a_field_deep_in_a_pod_is_checked() -> None:
    (jobset,) = documents("jobset", *NODES, *COMMAND)
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["containers"][0]["comand"] = ["a"]
    del pod["containers"][0]["name"]
    said = "; ".join(problems(jobset, crds()))
    assert "containers[0]: Additional properties are not allowed ('comand' was unexpected)" in said
    assert "containers[0]: 'name' is a required property" in said


def containers(name: str) -> dict[str, dict[str, Any]]:
    """The containers that a manifest starts, by name."""
    *_, job = documents(name, *NODES, *FULL, *COMMAND)
    spec = job["spec"]
    if name == "mpijob":
        pods = [replicas["template"]["spec"] for replicas in spec["mpiReplicaSpecs"].values()]
    elif name == "jobset":
        pods = [spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]]
    else:
        pods = [{"containers": [{"name": "trainer", **spec["trainer"]}]}]
    return {container["name"]: container for pod in pods for container in pod["containers"]}


@pytest.mark.parametrize(("name", "container"), [("mpijob", "launcher"), ("jobset", "node"), ("trainjob", "trainer")])
def test_the_command_comes_through_as_it_was_given(name: str, container: str) -> None:
    words = containers(name)[container]["args"]
    assert words[-4:] == ["python", "train.py", "--text", "it's $$(HOME): {image} #1"]  # $$ is Kubernetes' $


@pytest.mark.parametrize(
    ("name", "container", "field"),
    [("mpijob", "worker", "resources"), ("jobset", "node", "resources"), ("trainjob", "trainer", "resourcesPerNode")],
)
def test_resources_are_those_of_a_node(name: str, container: str, field: str) -> None:
    limits = containers(name)[container][field]["limits"]
    assert limits == {"cpu": 8, "memory": "16Gi", "nvidia.com/gpu": 4}


def test_a_jobset_is_not_started_again_after_its_time_limit() -> None:
    (job,) = documents("jobset", *NODES, *FULL, *COMMAND)
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
    options = ["run", "--mpi", "-np", "8", "-H", hosts, "--name", "train", "--"]
    assert done.stdout.splitlines() == [*options, "python", "a b"]
    assert (tmp_path / ".ssh/known_hosts").read_text() == "* ecdsa-sha2-nistp521 AAAA\n"
    assert "Port 2222\n" in (tmp_path / ".ssh/config").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_what_kubernetes_has_not_is_refused_at_once(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        render(name, "--nodes", "2", "--ranks-per-node", "2", "--name", "A_b", "--array", "1", *COMMAND, "{index}")
    for problem in (f"{name} has no --array", "--image is missing", f"{name} takes up to 40 small letters"):
        assert problem in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_another_value_of_yaml_stays_a_name(name: str) -> None:
    options = [*NODES, "--name", "true", "--claim", "12"]
    for document in documents(name, *options, *COMMAND):
        assert document["metadata"]["name"] == "true"
    assert "claimName': '12'" in str(documents(name, *options, *COMMAND))


def test_a_claim_that_kubernetes_would_refuse_is_refused() -> None:
    with pytest.raises(ConfigError, match="--claim is 'a, b: c'; valid are small letters"):
        render("jobset", *NODES, "--claim", "a, b: c", *COMMAND)


def pods(value: Any) -> list[dict[str, Any]]:
    """The specifications of pods in a manifest."""
    if isinstance(value, list):
        return [pod for item in value for pod in pods(item)]
    if not isinstance(value, dict):
        return []
    this = [value] if "terminationGracePeriodSeconds" in value else []
    return this + [pod for item in value.values() for pod in pods(item)]


@pytest.mark.parametrize("name", NAMES)
def test_every_pod_is_placed_as_it_was_asked_for(name: str) -> None:
    made = documents(name, *NODES, *WHERE, *COMMAND)
    assert {document["metadata"]["namespace"] for document in made} == {"team"}
    specs = pods(made)
    assert len(specs) == (2 if name == "mpijob" else 1)
    for pod in specs:
        assert pod["nodeSelector"] == {"example.com/gpu": "h100", "zone": "1"}
        assert pod["tolerations"] == [
            {"operator": "Exists", "key": "nvidia.com/gpu", "effect": "NoSchedule"},
            {"operator": "Equal", "key": "for", "value": "training", "effect": "NoExecute"},
            {"operator": "Exists", "key": "spot"},
        ]
        assert pod["imagePullSecrets"] == [{"name": "registry"}]


def test_a_place_that_kubernetes_would_refuse_is_refused() -> None:
    bad = ["--namespace", "A", "--node-selector", "gpu", "--toleration", "gpu:Never", "--pull-secret", "a b"]
    with pytest.raises(ConfigError) as error:
        render("jobset", *NODES, *bad, *COMMAND)
    for problem in (
        "--namespace is 'A'; valid are small letters",
        "--node-selector is 'gpu'; valid is a label, as in gpu=h100",
        "--toleration is 'gpu:Never'; valid is a taint",
        "--pull-secret is 'a b'; valid are small letters",
    ):
        assert problem in str(error.value)
    with pytest.raises(ConfigError, match="slurm has no --namespace; it is an option for Kubernetes"):
        render("slurm", "--nodes", "1", "--ranks-per-node", "1", "--namespace", "team", *COMMAND)


def test_torchrun_leaves_the_scripts_options_alone() -> None:
    assert containers("trainjob")["trainer"]["command"] == ["tini", "--", "torchrun", "--no-python", "--"]
    assert '--no-python -- "$@"' in containers("jobset")["node"]["args"][0]


def test_what_ends_a_trainjob_deletes_its_runtime_as_well() -> None:
    objects = ["trainjob.trainer.kubeflow.org/a", "trainingruntime.trainer.kubeflow.org/a"]
    assert SCHEDULERS["trainjob"].cancel_line(objects[0]) == f"kubectl delete {objects[0]} {objects[1]}"
    line = SCHEDULERS["trainjob"].cancel_line(f"{objects[0]} --namespace=team")
    assert line == f"kubectl delete {objects[0]} --namespace=team {objects[1]}"


def kubectl(folder: Path, condition: str, pods: str = "pod/train-launcher") -> None:
    """Write a `kubectl` that notes how it was called."""
    ended = {"type": condition, "status": "True", "reason": "BackoffLimit", "message": "two pods"}
    status = {"conditions": [{"type": "Created", "status": "True"}, ended]}
    stand_in(
        folder,
        "kubectl",
        f"""
        echo "$*" >> {folder}/calls
        case "$*" in
            create*) echo runtime/train; echo {"mpijob.kubeflow.org/train"} ;;
            "get pods"*status.phase!=Pending*) echo {pods} ;;
            "get pods"*) echo pod/train-launcher pod/pending ;;
            "logs pod/pending"*) echo "error: container is waiting to start" ;;
            get*) cat <<< '{json.dumps({"status": status})}' ;;
            logs*) printf 'epoch 1\\nepoch 2' ;;
        esac""",
    )


@pytest.mark.parametrize(("condition", "code"), [("Succeeded", 0), ("Failed", 1)])
def test_a_job_is_created_and_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], condition: str, code: int
) -> None:
    kubectl(tmp_path, condition)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    assert main(["submit", "mpijob", *NODES, "--follow", *COMMAND]) == code
    shown = capsys.readouterr()
    assert shown.out == "epoch 1\nepoch 2\n"
    assert "kubectl delete mpijob.kubeflow.org/train ends it" in shown.err
    logs = "kubectl logs --all-containers --prefix -l training.kubeflow.org/job-name=train"
    logs += ",training.kubeflow.org/job-role=launcher"
    assert f"its output: {logs}" in shown.err
    how = f"Failed (BackoffLimit: two pods); its output: {logs}" if code else "Succeeded"
    assert shown.err.endswith(f"job mpijob.kubeflow.org/train: {how}\n")


def test_the_lines_of_several_pods_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl(tmp_path, "Succeeded", "pod/train-0 pod/train-1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    assert main(["submit", "mpijob", *NODES, "--follow", *COMMAND]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"[pod/train-{pod}] epoch {epoch}" for pod in (0, 1) for epoch in (1, 2)
    ]


def test_kubectl_is_told_the_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl(tmp_path, "Succeeded")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    assert main(["submit", "mpijob", *NODES, "--namespace", "team", "--follow", *COMMAND]) == 0
    created, *calls = (tmp_path / "calls").read_text().splitlines()
    assert created.startswith("create -f runs/train.yaml")  # which has it
    assert {call.split()[0] for call in calls} == {"get", "logs"}
    assert [call for call in calls if "--namespace=team" not in call.split()] == []
    shown = capsys.readouterr().err
    assert "kubectl delete mpijob.kubeflow.org/train --namespace=team ends it" in shown
    assert "training.kubeflow.org/job-role=launcher --namespace=team\n" in shown

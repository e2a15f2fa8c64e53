"""Kubernetes: manifests, and `kubectl`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from trainer.ops.submit.job import OPTIONS, Job
from trainer.ops.submit.schedulers.base import ONE_JOB, Scheduler, State, call, with_prefix
from trainer.ops.submit.schedulers.template import fill, read

_ENDS = {"Succeeded": 0, "Complete": 0, "Completed": 0, "Failed": 1}
_NAME = r"[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?"
_OBJECT = r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?"
_KEY = rf"({_OBJECT}/)?{_NAME}"
_TOLERATION = rf"(?P<key>{_KEY})(=(?P<value>({_NAME})?))?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?"
_VALID = {
    # The names of pods, which are longer, have to stay below 64 characters.
    "name": (r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", "{} takes up to 40 small letters, digits and '-', a letter first"),
    "claim": (_OBJECT, "valid are small letters, digits, '-' and '.', as in --claim runs"),
    "namespace": (
        r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?",
        "valid are small letters, digits and '-', as in --namespace team",
    ),
    "pull_secrets": (_OBJECT, "valid are small letters, digits, '-' and '.'"),
    "node_selector": (rf"{_KEY}=({_NAME})?", "valid is a label, as in gpu=h100"),
    "tolerations": (_TOLERATION, "valid is a taint, as in gpu=h100:NoSchedule or gpu:NoExecute"),
}
"""Fields of `Job` that become names and labels: what Kubernetes takes, and how that is said."""


class Kubernetes(Scheduler):
    """Job files are manifests, for one of Kubernetes' operators."""

    suffix = ".yaml"
    submit_command = ("kubectl", "create", "-f")
    cancel = ("kubectl", "delete")
    launchers: tuple[str, ...] = ("torchrun",)
    lacks: Mapping[str, str] = {"array": ONE_JOB, "directives": "edit what --dry-run prints"}
    longest_name = 40
    runs_in_image = True
    pods: str
    """Label selector of the pods whose logs are shown, with {} for the job's name."""

    def name_from(self, text: str) -> str:
        """Return a valid name for a job, made from the name of its script."""
        words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
        return re.sub(r"^(?![a-z])", "job-", words)[: self.longest_name].rstrip("-")

    def values(self, job: Job) -> dict[str, object]:
        """Return what the template may name."""
        amounts = {
            "cpu": job.cpus_per_node,
            "memory": job.memory_gib and f"{job.memory_gib}Gi",
            "nvidia.com/gpu": job.gpus_per_node,
        }
        secrets = [{"name": name} for name in job.pull_secrets]
        values = super().values(job) | {
            "image": _json(job.image),
            "namespace": _json(job.namespace),
            # Kubernetes would replace $(NAME).
            "words": tuple(_json(word.replace("$", "$$")) for word in job.command),
            "limits": _json({kind: amount for kind, amount in amounts.items() if amount}),
            "pause_s": min(30, job.grace_s),
            "claim": _json(job.claim),
            "no_claim": None if job.claim else "{}",
            "node_selector": _json(dict(text.split("=") for text in job.node_selector)),
            "tolerations": _json([_toleration(text) for text in job.tolerations]),
            "pull_secrets": _json(secrets),
        }
        return {**values, "pod": fill(read("templates/pod.yaml"), values)}

    def problems(self, job: Job) -> list[str]:
        """Return the names that Kubernetes would refuse, and that an image is missing, a line each."""
        problems = super().problems(job)
        for name, (pattern, valid) in _VALID.items():
            value = getattr(job, name)
            texts = (value,) if isinstance(value, str) else value
            bad = [text for text in texts if text and not re.fullmatch(pattern, text, re.ASCII)]
            problems += [f"{OPTIONS[name].name} is {text!r}; {valid.format(self.name)}" for text in bad]
        return problems

    def submit(self, path: Path) -> str:
        """Create what the file describes; the job is the last of it. Its id has the namespace, as kubectl takes it."""
        job_id = call(*self.submit_command, str(path), "-o", "name").splitlines()[-1]
        namespace = re.search(r'^  namespace: "(.+)"$', path.read_text(), re.MULTILINE)
        return f"{job_id} --namespace={namespace[1]}" if namespace else job_id

    def states(self, job_id: str) -> Mapping[str, State]:
        """Read the job's conditions."""
        status = json.loads(call("kubectl", "get", *job_id.split(), "-o", "json")).get("status", {})
        true = {entry["type"]: entry for entry in status.get("conditions", []) if entry["status"] == "True"}
        ended = next((name for name in true if name in _ENDS), None)
        if ended is None:
            return {job_id: State(list(true)[-1] if true else "Waiting")}
        words = [true[ended].get(key, "") for key in ("reason", "message")] if _ENDS[ended] else []
        return {job_id: State(ended, _ENDS[ended], ": ".join(word for word in words if word))}

    def new_output(self, job: Job, job_id: str, seen: dict[str, int]) -> str:
        """Read the logs of the job's pods."""
        namespace = job_id.split()[1:]
        # Of a pod that is not running yet, kubectl prints an error among the logs.
        started = "--field-selector=status.phase!=Pending"
        pods = call(
            "kubectl", "get", "pods", "-l", self.pods.format(job.name), started, "-o", "name", *namespace
        ).split()
        output = ""
        for pod in pods:
            log = call("kubectl", "logs", pod, "--all-containers", "--ignore-errors", *namespace)
            begin = seen.get(pod, 0) if seen.get(pod, 0) <= len(log) else 0  # a container that was started again
            prefix = f"[{pod}] " if len(pods) > 1 else ""
            output += with_prefix(prefix, log[begin:].removeprefix("\n"))
            seen[pod] = len(log)
        return output

    def logs(self, job: Job, job_id: str) -> str:
        """Return the command that shows the pods' logs."""
        words = ["kubectl logs --all-containers --prefix -l", self.pods.format(job.name), *job_id.split()[1:]]
        return " ".join(words)

    def cancel_line(self, job_id: str) -> str:
        """Return the line that ends a job, and a trainjob's runtime, whose name another submission needs."""
        kind, _, name = job_id.split()[0].partition("/")
        runtime = [f"trainingruntime.trainer.kubeflow.org/{name}"] if kind.startswith("trainjob.") else []
        return shlex.join((*self.cancel, *job_id.split(), *runtime))


class MpiJob(Kubernetes):
    """A launcher's pod starts the ranks in the workers' pods."""

    name = "mpijob"
    summary = "Kubernetes with Kubeflow's MPI Operator (v2beta1): Horovod or torchrun over ssh"
    launchers = ("mpi", "gloo", "torchrun")
    pods = "training.kubeflow.org/job-name={},training.kubeflow.org/job-role=launcher"  # prints what the ranks print


class JobSet(Kubernetes):
    """torchrun in each pod."""

    name = "jobset"
    summary = "Kubernetes with JobSet (v1alpha2): torchrun in each pod"
    pods = "jobset.sigs.k8s.io/jobset-name={}"


class TrainJob(JobSet):
    """Becomes a JobSet of the same name."""

    name = "trainjob"
    summary = "Kubernetes with Kubeflow Trainer v2 (v1alpha1): torchrun in each pod"


def _json(value: object) -> str | None:
    """Return a value for YAML, which takes JSON's; None where it is empty, and its line is left out."""
    return json.dumps(value, ensure_ascii=False) if value else None


def _toleration(text: str) -> dict[str, str]:
    match = re.fullmatch(_TOLERATION, text, re.ASCII)
    parts = match.groupdict() if match else {}
    operator = "Exists" if parts.get("value") is None else "Equal"
    return {"operator": operator} | {name: part for name, part in parts.items() if part is not None}

"""What the job files for Kubernetes have in common, and `kubectl`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import ClassVar

from trainer.ops.submit.job import Job
from trainer.ops.submit.schedulers.base import Scheduler, State, call, fill, with_prefix

RESTARTS = 10
"""How often a job's pods are made again before it is given up."""
_ENDS = {"Succeeded": 0, "Complete": 0, "Completed": 0, "Failed": 1}
# The names of pods, which are longer, have to stay below 64 characters.
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_OBJECT = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_WORD = r"[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?"
_KEY = rf"([a-z0-9]([-.a-z0-9]{{0,251}}[a-z0-9])?/)?{_WORD}"
_LABEL = re.compile(rf"(?P<key>{_KEY})=(?P<value>({_WORD})?)", re.ASCII)
_TOLERATION = re.compile(
    rf"(?P<key>{_KEY})(=(?P<value>({_WORD})?))?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?", re.ASCII
)


class Kubernetes(Scheduler):
    """Job files are YAML, submitted with `kubectl create`."""

    suffix = ".yaml"
    longest_name = 40
    product: ClassVar[str]
    """Its name in the head of a file."""
    lacks: ClassVar[Mapping[str, str]] = {
        "array": "submit a job for each, under a --name of its own",
        "directives": "edit what --dry-run prints",
    }

    proof: ClassVar[str]
    """What the file was run against, and when, a line or more."""
    template: ClassVar[str]
    """The job file without its head, with the names of `parts` in braces."""
    pods: ClassVar[str]
    """The label selector of the pods whose logs are shown."""

    def name_from(self, text: str) -> str:
        """Return a valid name for a job, made from that of its script."""
        words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
        return re.sub(r"^(?![a-z])", "job-", words)[: self.longest_name].rstrip("-")

    def parts(self, job: Job) -> dict[str, object]:
        """Return what goes into the template."""
        return {
            "name": job.name, "nodes": job.nodes, "ranks_per_node": job.ranks_per_node, "restarts": RESTARTS,
            "deadline": f"activeDeadlineSeconds: {job.time_s}\n" if job.time_s else "", "image": quoted(job.image),
            "pod": pod(job), "container": _CONTAINER, "resources": resources(job), "arguments": arguments(job.command),
            "namespace": f"namespace: {quoted(job.namespace)}\n" if job.namespace else "",
        }  # fmt: skip

    def render(self, job: Job) -> str:
        """Return the YAML file."""
        proof = self.proof + (" Not run with GPUs." if job.gpus_per_node else "")
        return (
            f"# {job.nodes} x {job.ranks_per_node} ranks (nodes x ranks per node) for {self.product}. Written by\n"
            f"#\n#     {job.made_by}\n#\n"
            f"# and is submitted, where that has not done it, by: kubectl create -f THIS-FILE\n"
            f"{indent(proof, '# ')}\n\n{fill(self.template, **self.parts(job))}"
        )

    def problems(self, job: Job) -> list[str]:
        """Refuse names that Kubernetes would refuse, and a job without an image."""
        problems = []
        if not job.image:
            problems.append(f"--image is missing; {self.name} runs the ranks in containers, as in --image trainer:cpu")
        if not _NAME.fullmatch(job.name):
            problems.append(
                f"--name is {job.name!r}; {self.name} takes up to 40 small letters, digits and '-', a letter first"
            )
        for option, texts, pattern, valid in (
            ("claim", (job.claim,), _OBJECT, "are small letters, digits, '-' and '.', as in --claim runs"),
            ("namespace", (job.namespace,), _NAMESPACE, "are small letters, digits and '-', as in --namespace team"),
            ("pull-secret", job.pull_secrets, _OBJECT, "are small letters, digits, '-' and '.'"),
            ("node-selector", job.node_selector, _LABEL, "is a label, as in gpu=h100"),
            ("toleration", job.tolerations, _TOLERATION, "is a taint, as in gpu=h100:NoSchedule or gpu:NoExecute"),
        ):
            bad = [text for text in texts if text and not pattern.fullmatch(text)]
            problems += [f"--{option} is {text!r}; valid {valid}" for text in bad]
        return problems

    def runs_here(self, job: Job) -> bool:
        """Return False: it runs in the image's folder."""
        del job
        return False

    def submit(self, path: Path) -> str:
        """Create what the file describes; the job is the last of it. Its id has the namespace, as kubectl takes it."""
        job_id = call("kubectl", "create", "-f", str(path), "-o", "name").splitlines()[-1]
        namespace = re.search(r'^  namespace: "(.+)"$', path.read_text(), re.MULTILINE)
        return f"{job_id} --namespace={namespace[1]}" if namespace else job_id

    def states(self, job_id: str) -> Mapping[str, State]:
        """Read the job's conditions."""
        status = json.loads(call("kubectl", "get", *job_id.split(), "-o", "json")).get("status", {})
        true = {one["type"]: one for one in status.get("conditions", []) if one["status"] == "True"}
        ended = next((one for one in true if one in _ENDS), None)
        if ended is None:
            return {job_id: State(list(true)[-1] if true else "Waiting")}
        words = [true[ended].get(key, "") for key in ("reason", "message")] if _ENDS[ended] else []
        return {job_id: State(ended, _ENDS[ended], ": ".join(word for word in words if word))}

    def new_output(self, job: Job, job_id: str, seen: dict[str, int]) -> str:
        """Read the logs of the job's pods."""
        own = job_id.split()[1:]
        # Of a pod that is not running yet, kubectl prints an error among the logs.
        started = "--field-selector=status.phase!=Pending"
        pods = call("kubectl", "get", "pods", "-l", fill(self.pods, name=job.name), started, "-o", "name", *own).split()
        found = ""
        for pod in pods:
            log = call("kubectl", "logs", pod, "--all-containers", "--ignore-errors", *own)
            begin = seen.get(pod, 0) if seen.get(pod, 0) <= len(log) else 0  # a container that was started again
            prefix = f"[{pod}] " if len(pods) > 1 else ""
            found += with_prefix(prefix, log[begin:].removeprefix("\n"))
            seen[pod] = len(log)
        return found

    def logs(self, job: Job, job_id: str) -> str:
        """Return the command that shows the pods' logs."""
        words = ["kubectl logs --all-containers --prefix -l", fill(self.pods, name=job.name), *job_id.split()[1:]]
        return " ".join(words)

    def cancel_command(self, job_id: str) -> Sequence[str]:
        """Return the command that ends a job."""
        return ("kubectl", "delete", *job_id.split())


def quoted(text: str) -> str:
    """Return a string for YAML, which takes JSON's."""
    return json.dumps(text, ensure_ascii=False)


def arguments(command: Sequence[str]) -> str:
    """Return the items of a container's `args`, in which Kubernetes would replace $(NAME)."""
    return "".join(f"- {quoted(word.replace('$', '$$'))}\n" for word in command)


def resources(job: Job) -> str:
    """Return a container's resources; empty where the namespace's defaults are taken."""
    amounts = {"cpu": job.cpus_per_node, "memory": job.memory_gib and f"{job.memory_gib}Gi"}
    lines = [f"    {kind}: {json.dumps(amount)}\n" for kind, amount in amounts.items() if amount]
    if job.gpus_per_node:
        lines.append(f"    nvidia.com/gpu: {job.gpus_per_node}\n")
    return f"resources:\n  limits:\n{''.join(lines)}" if lines else ""


def pod(job: Job) -> str:
    """Return the fields that every pod has beside its containers."""
    runs = f"persistentVolumeClaim: {{claimName: {quoted(job.claim)}}}" if job.claim else "emptyDir: {}"
    why = (
        "The checkpoints, on a volume that all pods see."
        if job.claim
        else "The checkpoints go with the pod. --claim NAME puts them on a PersistentVolumeClaim."
    )
    return (
        f"# SIGTERM comes first when a pod is ended; the ranks save, and are killed {job.grace_s} s later.\n"
        f"terminationGracePeriodSeconds: {job.grace_s}\n"
        "# The image's own user. fsGroup lets it write to volumes.\n"
        "securityContext: {runAsUser: 1000, runAsGroup: 1000, fsGroup: 1000, runAsNonRoot: true}\n"
        "volumes:\n"
        "# Ranks of a node share memory; the default of 64 MB is too small.\n"
        "- name: shm\n  emptyDir: {medium: Memory}\n"
        f"# {why}\n"
        f"- name: runs\n  {runs}\n"
        f"{_where(job)}"
    )


def _where(job: Job) -> str:
    """Return the fields that choose a pod's node, and pull its image; empty without any."""
    labels = {found["key"]: found["value"] for text in job.node_selector if (found := _LABEL.fullmatch(text))}
    taints = [found.groupdict() for text in job.tolerations if (found := _TOLERATION.fullmatch(text))]
    tolerations = [
        {"operator": "Exists" if taint["value"] is None else "Equal"}
        | {name: value for name, value in taint.items() if value is not None}
        for taint in taints
    ]
    secrets = [{"name": name} for name in job.pull_secrets]
    fields = {"nodeSelector": labels, "tolerations": tolerations, "imagePullSecrets": secrets}
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in fields.items() if value)


_CONTAINER = """\
securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
volumeMounts:
- {name: shm, mountPath: /dev/shm}
- {name: runs, mountPath: /trainer/runs}
"""

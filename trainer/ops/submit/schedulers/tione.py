"""TI-ONE, Tencent's training platform: a task of its mode DDP, created with Tencent Cloud's command line `tccli`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from trainer.ops.submit.job import Job, shell_command
from trainer.ops.submit.schedulers.base import KUBERNETES_ONLY, Scheduler, State, call, fill, need

_SCRIPT = """\
#!/bin/bash
# {nodes} x {ranks_per_node} ranks (nodes x ranks per node) for TI-ONE. It was written by
#
#     {made_by}
#
# and is submitted, where that has not done it, by: bash THIS-FILE
# Not run: no TI-ONE was at hand. It follows the documentation of the API of 2021-11-11. Check first whether
# - `tccli configure` has your account and region, and `tccli tione DescribeTrainingTasks` answers;
# - the task shows the image, the mode DDP and the command in the console, before it takes many GPUs. Where the
#   command is refused for its characters, the API takes EncodedStartCmdInfo, its JSON in base64;
# - the command runs in the image's own folder, can write to runs/ there, and has a /dev/shm of 64 MB for each rank;
# - stopping the task sends SIGTERM to torchrun some seconds before it is killed. Else only --checkpoint-every saves.

set -eu
request=$(mktemp)
trap 'rm -f "$request"' EXIT
# StartCmd runs on each node. TI-ONE sets MASTER_ADDR and MASTER_PORT, and RANK to the number of the node.
# Cpu counts thousandths of a core, Memory MB, Gpu hundredths of a GPU: of each of InstanceNum nodes.
cat > "$request" <<'REQUEST'
{request}
REQUEST
tccli tione CreateTrainingTask --version 2021-11-11 --cli-input-json "file://$request"
"""
_START = (
    'exec torchrun --nnodes {nodes} --nproc-per-node {ranks} --node-rank "$RANK" --master-addr "$MASTER_ADDR" '
    '--master-port "$MASTER_PORT" --log-dir runs/{name} --tee 3 --no-python -- {command}'
)
_FIELDS = (
    "ResourceGroupId", "InstanceType", "GpuType", "ImageType", "RegistryRegion", "RegistryId", "CFSSource.Id",
    "CFSSource.Path", "VpcId", "SubnetId", "RDMAConfig.Enable",
)  # fmt: skip
_ENDS = {"SUCCEED": 0, "FAILED": 1, "STOPPED": 1}
_RUNS = "/trainer/runs"
"""Where the image writes checkpoints and logs."""


class TIONE(Scheduler):
    """TI-ONE, API version 2021-11-11."""

    name = "tione"
    summary = "Tencent's TI-ONE: torchrun on each node (not run)"
    suffix = ".sh"
    launchers = ("torchrun",)
    longest_name = 60
    lacks: ClassVar[Mapping[str, str]] = {
        **KUBERNETES_ONLY,
        "array": "submit a job for each, under a --name of its own",
        "time_s": "its API has no limit; end the task with `tccli tione StopTrainingTask`",
        "claim": "runs/ comes from a file system, as in --directive=CFSSource.Id=cfs-…",
    }

    def render(self, job: Job) -> str:
        """Return the script that creates the task."""
        request = json.dumps(_request(job), indent=2, ensure_ascii=False)
        return fill(
            _SCRIPT, nodes=job.nodes, ranks_per_node=job.ranks_per_node, made_by=job.made_by, request=f"{request}\n"
        )

    def problems(self, job: Job) -> list[str]:
        """Refuse a task without an image or resources, and fields that are not known."""
        own = _own(job)
        problems = [
            f"--directive is {text!r}; valid are {', '.join(_FIELDS)} with a value, as in VpcId=vpc-…; of "
            "RDMAConfig.Enable it is true"
            for text in job.directives
            if not _is_valid(text)
        ]
        if not job.image:
            problems.append("--image is missing; tione runs the ranks in containers")
        if len(job.name) > self.longest_name:
            problems.append(f"--name is {job.name!r}; tione takes up to {self.longest_name} characters")
        if ("ResourceGroupId" in own) == ("InstanceType" in own):
            problems.append(
                "tione needs one of --directive=ResourceGroupId=rsg-… (a resource group of yours) and "
                "--directive=InstanceType=TI.… (paid by the hour)"
            )
        elif "ResourceGroupId" in own:
            missing = [] if job.cpus_per_rank else ["--cpus-per-rank"]
            missing += [] if job.memory_gib else ["--memory"]
            missing += ["--directive=GpuType=…"] if job.gpus_per_node and "GpuType" not in own else []
            problems += [f"{option} is missing; a resource group needs it" for option in missing]
        elif job.cpus_per_rank or job.memory_gib or "GpuType" in own:
            problems.append("--cpus-per-rank, --memory and GpuType come with the InstanceType; leave them out")
        return problems

    def runs_here(self, job: Job) -> bool:
        """Return False: it runs in the image's folder."""
        del job
        return False

    def submit(self, path: Path) -> str:
        """Create the task."""
        need("tccli")
        return str(_answer(call("bash", str(path)))["Id"])

    def states(self, job_id: str) -> Mapping[str, State]:
        """Ask for the task's details."""
        status = str(_answer(_call("DescribeTrainingTask", job_id))["TrainingTaskDetail"]["Status"])
        return {job_id: State(status, _ENDS.get(status))}

    def new_output(self, job: Job, job_id: str, seen: dict[str, int]) -> str:
        """Return nothing: the console shows the logs, and runs/NAME has them."""
        del job, job_id, seen
        return ""

    def logs(self, job: Job, job_id: str) -> str:
        """Return the folder on the task's file system."""
        del job_id
        return f"the console, and runs/{job.name}/ on the task's file system"

    def cancel_command(self, job_id: str) -> Sequence[str]:
        """Return the command that stops the task."""
        return _command("StopTrainingTask", job_id)


def _command(action: str, job_id: str) -> Sequence[str]:
    return ("tccli", "tione", action, "--version", "2021-11-11", "--Id", job_id)


def _call(action: str, job_id: str) -> str:
    return call(*_command(action, job_id))


def _answer(text: str) -> Any:
    value = json.loads(text)
    return value.get("Response", value)  # the API's own examples have it, those of tccli do not


def _is_valid(directive: str) -> bool:
    field, _, value = directive.partition("=")
    return value == "true" if field == "RDMAConfig.Enable" else field in _FIELDS and value != ""


def _own(job: Job) -> dict[str, str]:
    """Return the fields of the API that directives set."""
    return {name: value for name, _, value in (text.partition("=") for text in job.directives)}


def _request(job: Job) -> dict[str, Any]:
    own = _own(job)
    has_group = "ResourceGroupId" in own
    nodes: dict[str, Any] = {"Role": "WORKER", "InstanceNum": job.nodes}
    if has_group:
        nodes |= {"Cpu": 1000 * (job.cpus_per_node or 0), "Memory": 1024 * (job.memory_gib or 0)}
        nodes |= {"Gpu": 100 * job.gpus_per_node, "GpuType": own.get("GpuType", "")} if job.gpus_per_node else {}
    else:
        nodes["InstanceType"] = own.get("InstanceType", "")
    if "RDMAConfig.Enable" in own:
        nodes["RDMAConfig"] = {"Enable": True}
    image = {"ImageType": own.get("ImageType", "CUSTOM"), "ImageUrl": job.image}
    image |= {field: own[field] for field in ("RegistryRegion", "RegistryId") if field in own}
    command = shell_command(job.command)
    request: dict[str, Any] = {
        "Name": job.name, "ChargeType": "PREPAID" if has_group else "POSTPAID_BY_HOUR",
        "ResourceConfigInfos": [nodes], "TrainingMode": "DDP", "ImageInfo": image,
        "StartCmdInfo": {
            "StartCmd": _START.format(nodes=job.nodes, ranks=job.ranks_per_node, name=job.name, command=command)
        },
    }  # fmt: skip
    if "CFSSource.Id" in own:
        source = {"Id": own["CFSSource.Id"], "Path": own.get("CFSSource.Path", "/")}
        config = {"DataSourceType": "CFS", "MappingPath": _RUNS, "CFSSource": source}
        request |= {"DataSource": "CFS", "DataConfigs": [config]}
    return request | {field: own[field] for field in ("ResourceGroupId", "VpcId", "SubnetId") if field in own}

"""PBS, LSF and Tencent's TI-ONE, which nobody has run: templates that follow the documentation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainer.ops.submit.job import Job, shell_command
from trainer.ops.submit.schedulers.base import KUBERNETES_ONLY, Scheduler, batch_problems
from trainer.ops.submit.schedulers.template import read

_LACKS = {**KUBERNETES_ONLY, "image": "start the container runtime in the command"}
_ONE_JOB = "submit a job for each, under a --name of its own"


@dataclass(frozen=True, kw_only=True)
class Untried(Scheduler):
    """A scheduler for which there is a template, and no more."""

    is_tried: bool = False
    more_values: Callable[[Job], Mapping[str, object]]
    """What goes into the template beside what every scheduler has."""
    more_problems: Callable[[Job], list[str]] | None = None

    def values(self, job: Job) -> dict[str, object]:
        """Return what goes into the template."""
        return super().values(job) | dict(self.more_values(job))

    def problems(self, job: Job) -> list[str]:
        """Return what this scheduler cannot do for a job, a line each."""
        problems = self.more_problems(job) if self.more_problems else batch_problems(self.name, job)
        if len(job.name) > self.longest_name:
            problems.append(f"--name is {job.name!r}; {self.name} takes up to {self.longest_name} characters")
        return super().problems(job) + problems


def _pbs(job: Job) -> Mapping[str, object]:
    return {
        "cores": job.cpus_per_node or job.ranks_per_node,
        "and_gpus": f":ngpus={job.gpus_per_node}" if job.gpus_per_node else "",
        "and_memory": f":mem={job.memory_gib}gb" if job.memory_gib else "",
    }


def _lsf(job: Job) -> Mapping[str, object]:
    minutes = -(-job.time_s // 60) if job.time_s else 0
    return {
        "array_in_brackets": f"[{job.array}]" if job.array else "",
        "hours_and_minutes": f"{minutes // 60}:{minutes % 60:02}" if minutes else None,
    }


def _tione_fields() -> list[str]:
    """Return the fields of the API that directives set: those names of the template that begin with a capital."""
    return re.findall(r"__([A-Z][A-Za-z.]+)__", read("templates/tione.sh"))


def _tione(job: Job) -> Mapping[str, object]:
    given = {name: _in_json(value) for name, _, value in (text.partition("=") for text in job.directives)}
    defaults = {"ImageType": "CUSTOM"} | ({"CFSSource.Path": "/"} if "CFSSource.Id" in given else {})
    return {
        **dict.fromkeys(_tione_fields()), **defaults, **given,
        "charge_type": "PREPAID" if "ResourceGroupId" in given else "POSTPAID_BY_HOUR",
        "data_source": "CFS" if "CFSSource.Id" in given else None,
        "millicores": job.cpus_per_node and 1000 * job.cpus_per_node,
        "memory_mib": job.memory_gib and 1024 * job.memory_gib,
        "gpu_hundredths": 100 * job.gpus_per_node if "ResourceGroupId" in given and job.gpus_per_node else None,
        "image": _in_json(job.image),
        "command": _in_json(shell_command(job.command)),
    }  # fmt: skip


def _in_json(text: str) -> str:
    """Return a text as it stands between the quotation marks of a string of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _tione_problems(job: Job) -> list[str]:
    fields = _tione_fields()
    given = {text.partition("=")[0] for text in job.directives}
    problems = [
        "tione needs one of --directive=ResourceGroupId=rsg-… (a resource group of yours) and "
        "--directive=InstanceType=TI.… (paid by the hour)"
    ]
    return problems * (len(given & {"ResourceGroupId", "InstanceType"}) != 1) + [
        f"--directive is {text!r}; valid are {', '.join(fields)} with a value, as in VpcId=vpc-…; of "
        "RDMAConfig.Enable it is true"
        for text in job.directives
        if not re.fullmatch(rf"RDMAConfig\.Enable=true|(?!RDMA)({'|'.join(fields)})=.+", text)
    ]


PBS = Untried(
    name="pbs",
    summary="PBS: qsub and mpirun (not run)",
    suffix=".pbs",
    lacks={**_LACKS, "array": _ONE_JOB},
    more_values=_pbs,
)
LSF = Untried(
    name="lsf",
    summary="LSF: bsub and mpirun (not run)",
    suffix=".lsf",
    index="LSB_JOBINDEX",
    lacks={**_LACKS, "memory_gib": "its unit is the site's: --directive='-M 16GB'"},
    more_values=_lsf,
)
TI_ONE = Untried(
    name="tione",
    summary="Tencent's TI-ONE: torchrun on each node (not run)",
    suffix=".sh",
    launchers=("torchrun",),
    longest_name=60,
    runs_in_image=True,
    lacks={
        **KUBERNETES_ONLY,
        "array": _ONE_JOB,
        "time_s": "its API has no limit; end the task with `tccli tione StopTrainingTask`",
        "claim": "runs/ comes from a file system, as in --directive=CFSSource.Id=cfs-…",
    },
    more_values=_tione,
    more_problems=_tione_problems,
)

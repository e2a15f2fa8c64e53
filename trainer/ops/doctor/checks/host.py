"""Memory, cores, limits, disk and clock of each host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainer.ops.doctor.agent.machine import NO_LIMIT
from trainer.ops.doctor.facts import Facts
from trainer.ops.doctor.finding import About, Cause, Finding
from trainer.ops.supervise.hosts import Host

MIB, GIB = 2**20, 2**30
SHM_PER_RANK = 64 * MIB
MEMORY_PER_RANK = 512 * MIB
"""What a process with PyTorch takes before it has a model."""
LEAST_OPEN_FILES = 1024
LEAST_DISK = GIB
MOST_CLOCK_S = 2.0


def check(facts: Facts) -> Iterator[Finding]:
    """Yield what each host lacks for the ranks that -H gives it."""
    for host in facts.answering:
        about, machine = About(Cause.HOST, host.name), facts.machines[host.name]
        yield from _memory(about, host, machine)
        yield from _limits(about, host, machine)
        yield from _disk(about, host, machine)
        yield from _clock(about, host, facts)
    yield from _users(facts)


def _memory(about: About, host: Host, machine: Mapping[str, Any]) -> Iterator[Finding]:
    if machine["shm_free"] < host.slots * SHM_PER_RANK:
        yield about.problem(
            f"on {host.name}, /dev/shm has {machine['shm_free'] / MIB:.0f} MiB free, and its {host.slots} ranks "
            f"need {host.slots * SHM_PER_RANK // MIB} for what they share",
            "`docker run --shm-size 1g`, shm_size in compose, or `sudo mount -o remount,size=1g /dev/shm`",
        )
    free = machine["memory_free"]
    ranks = f"{host.slots} ranks, each of which takes {MEMORY_PER_RANK // MIB} MiB before it has a model"
    if free["cgroup"] < host.slots * MEMORY_PER_RANK:
        yield about.problem(
            f"on {host.name}, the memory limit of its container or cgroup leaves {free['cgroup'] / MIB:.0f} MiB for "
            f"{ranks}",
            "raise the limit (--memory, mem_limit, --mem)",
        )
    elif free["machine"] < host.slots * MEMORY_PER_RANK:
        text = f"on {host.name}, there are {free['machine'] / MIB:.0f} MiB for {ranks}"
        yield about.problem(text, "end other programs there")


def _limits(about: About, host: Host, machine: Mapping[str, Any]) -> Iterator[Finding]:
    name = host.name
    if machine["cores"] < host.slots:
        fewer = f"{name}:{max(1, int(machine['cores']))}"
        yield about.warning(
            f"{name} has {machine['cores']:g} of the {host.slots} cores that its ranks need",
            f"name fewer slots (-H {fewer}), or give the container more (--cpus, --cpuset-cpus)",
        )
    if machine["open_files"] < LEAST_OPEN_FILES:
        yield about.problem(
            f"on {name}, a process may have {machine['open_files']} open files",
            f"raise `ulimit -n` to {LEAST_OPEN_FILES} at least: nofile in /etc/security/limits.conf, or --ulimit of "
            "the container",
        )
    if machine["has_rdma"] and machine["locked_memory"] < NO_LIMIT:
        yield about.problem(
            f"on {name}, RDMA (/dev/infiniband) needs locked memory, of which a process may have "
            f"{machine['locked_memory'] // 1024} KiB",
            "memlock unlimited in /etc/security/limits.conf, or `--ulimit memlock=-1` of the container",
        )
    if not machine["reads_memory"] and not machine["single_copy_is_off"]:
        yield about.warning(
            f"{name} refuses process_vm_readv (seccomp), with which Open MPI copies between ranks",
            "`btl_vader_single_copy_mechanism = none` in openmpi-mca-params.conf, or --cap-add SYS_PTRACE of the "
            "container",
        )


def _disk(about: About, host: Host, machine: Mapping[str, Any]) -> Iterator[Finding]:
    outputs = machine["outputs"]
    path = outputs["path"]
    if not machine["folder_exists"]:
        return
    if not outputs["is_writable"]:
        yield about.warning(
            f"on {host.name}, {path} cannot be written by user {machine['user']}",
            "give --output and --checkpoint a folder that can, or change its owner",
        )
    elif outputs["free"] < LEAST_DISK:
        yield about.problem(
            f"on {host.name}, the disk of {path} has {outputs['free'] / MIB:.0f} MiB free, where checkpoints and "
            "records go",
            f"`df -h {path}` there; free some, or choose another folder",
        )


def _clock(about: About, host: Host, facts: Facts) -> Iterator[Finding]:
    ahead = facts.clocks.get(host.name, 0.0)
    if abs(ahead) > MOST_CLOCK_S:
        way = "ahead of" if ahead > 0 else "behind"
        yield about.warning(
            f"the clock of {host.name} is {abs(ahead):,.0f} s {way} that of {facts.here}",
            f"`sudo timedatectl set-ntp true` on {host.name}",
        )


def _users(facts: Facts) -> Iterator[Finding]:
    names = [host.name for host in facts.answering]
    users = {name: facts.machines[name]["user_id"] for name in names}
    titles = {name: f"{facts.machines[name]['user']} ({users[name]})" for name in names}
    for name in names[1:]:
        first = names[0]
        if users[name] != users[first]:
            yield About(Cause.HOST, first, name).warning(
                f"the job is user {titles[first]} on {first} and {titles[name]} on {name}, so that neither may "
                "write the other's files on a shared disk",
                f"log in to {name} as a user of the same number: User in ~/.ssh/config",
            )

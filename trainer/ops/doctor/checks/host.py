"""A host by itself: memory, cores, limits, disk, clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainer.ops.doctor.agent.machine import NO_LIMIT
from trainer.ops.doctor.facts import Facts
from trainer.ops.doctor.finding import Cause, Finding, problem, warning
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
        machine = facts.machines[host.name]
        yield from _memory(host, machine)
        yield from _limits(host, machine)
        yield from _disk(host, machine)
        yield from _clock(facts, host)
    yield from _users(facts)


def _memory(host: Host, machine: Mapping[str, Any]) -> Iterator[Finding]:
    if machine["shm_free"] < host.slots * SHM_PER_RANK:
        yield problem(
            Cause.HOST, (host.name,),
            f"on {host.name}, /dev/shm has {machine['shm_free'] / MIB:.0f} MiB free, and its {host.slots} ranks "
            f"need {host.slots * SHM_PER_RANK // MIB} for what they share",
            "`docker run --shm-size 1g`, shm_size in compose, or `sudo mount -o remount,size=1g /dev/shm`",
        )  # fmt: skip
    free = machine["memory_free"]
    for kind, text in (("cgroup", "the memory limit of its container or cgroup leaves"), ("machine", "there are")):
        if free[kind] < host.slots * MEMORY_PER_RANK:
            yield problem(
                Cause.HOST, (host.name,),
                f"on {host.name}, {text} {free[kind] / MIB:.0f} MiB for {host.slots} ranks, each of which takes "
                f"{MEMORY_PER_RANK // MIB} MiB before it has a model",
                "raise the limit (--memory, mem_limit, --mem)" if kind == "cgroup" else "end other programs there",
            )  # fmt: skip
            return


def _limits(host: Host, machine: Mapping[str, Any]) -> Iterator[Finding]:
    name = host.name
    if machine["cores"] < host.slots:
        yield warning(
            Cause.HOST, (name,), f"{name} has {machine['cores']:g} of the {host.slots} cores that its ranks need",
            f"name fewer slots (-H {name}:{max(1, int(machine['cores']))}), or give the container more (--cpus, "
            "--cpuset-cpus)",
        )  # fmt: skip
    if machine["open_files"] < LEAST_OPEN_FILES:
        yield problem(
            Cause.HOST, (name,), f"on {name}, a process may have {machine['open_files']} open files",
            f"raise `ulimit -n` to {LEAST_OPEN_FILES} at least: nofile in /etc/security/limits.conf, or --ulimit of "
            "the container",
        )  # fmt: skip
    if machine["has_rdma"] and machine["locked_memory"] < NO_LIMIT:
        yield problem(
            Cause.HOST, (name,),
            f"on {name}, RDMA (/dev/infiniband) needs locked memory, of which a process may have "
            f"{machine['locked_memory'] // 1024} KiB",
            "memlock unlimited in /etc/security/limits.conf, or `--ulimit memlock=-1` of the container",
        )  # fmt: skip
    if not machine["reads_memory"] and not machine["single_copy_is_off"]:
        yield warning(
            Cause.HOST, (name,),
            f"{name} refuses process_vm_readv (seccomp), with which Open MPI copies between ranks",
            "`btl_vader_single_copy_mechanism = none` in openmpi-mca-params.conf, or --cap-add SYS_PTRACE of the "
            "container",
        )  # fmt: skip


def _disk(host: Host, machine: Mapping[str, Any]) -> Iterator[Finding]:
    outputs = machine["outputs"]
    if not machine["folder_exists"]:
        return
    if not outputs["is_writable"]:
        yield warning(
            Cause.HOST, (host.name,), f"on {host.name}, {outputs['path']} cannot be written by user {machine['user']}",
            "give --output and --checkpoint a folder that can, or change its owner",
        )  # fmt: skip
    elif outputs["free"] < LEAST_DISK:
        yield problem(
            Cause.HOST, (host.name,),
            f"on {host.name}, the disk of {outputs['path']} has {outputs['free'] / MIB:.0f} MiB free, where "
            "checkpoints and records go", f"`df -h {outputs['path']}` there; free some, or choose another folder",
        )  # fmt: skip


def _clock(facts: Facts, host: Host) -> Iterator[Finding]:
    ahead = facts.clocks.get(host.name, 0.0)
    if abs(ahead) > MOST_CLOCK_S:
        way = "ahead of" if ahead > 0 else "behind"
        yield warning(
            Cause.HOST, (host.name,), f"the clock of {host.name} is {abs(ahead):,.0f} s {way} that of {facts.here}",
            f"`sudo timedatectl set-ntp true` on {host.name}",
        )  # fmt: skip


def _users(facts: Facts) -> Iterator[Finding]:
    found = {host.name: facts.machines[host.name] for host in facts.answering}
    for name, machine in list(found.items())[1:]:
        first = next(iter(found))
        if machine["user_id"] != found[first]["user_id"]:
            yield warning(
                Cause.HOST, (first, name),
                f"the job is user {_user(found[first])} on {first} and {_user(machine)} on {name}, so that neither may "
                "write the other's files on a shared disk",
                f"log in to {name} as a user of the same number: User in ~/.ssh/config",
            )  # fmt: skip


def _user(machine: Mapping[str, Any]) -> str:
    return f"{machine['user']} ({machine['user_id']})"

"""Memory, cores, limits, disk and clock of each host."""

from __future__ import annotations

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


def check(facts: Facts) -> Iterator[Finding]:
    """Yield what each host lacks for the ranks that -H gives it."""
    for host in facts.answering:
        about = About(Cause.HOST, host)
        yield from _memory(about, host)
        yield from _limits(about, host)
        yield from _disk(about, host)
        if abs(host.seconds_ahead) > MOST_CLOCK_S:
            way = "ahead of" if host.seconds_ahead > 0 else "behind"
            yield about.warning(
                f"the clock of {host} is {abs(host.seconds_ahead):,.0f} s {way} that of {facts.here}",
                f"`sudo timedatectl set-ntp true` on {host}",
            )
    for host in facts.answering[1:]:
        yield from _users(facts.answering[0], host)


def _memory(about: About, host: HostFacts) -> Iterator[Finding]:
    shm_mib, needed_mib = host.machine["shm_free"] / MIB, host.slots * SHM_PER_RANK // MIB
    if shm_mib < needed_mib:
        yield about.problem(
            f"on {host}, /dev/shm has {shm_mib:.0f} MiB free, and its {host.slots} ranks need {needed_mib} for "
            "what they share",
            "`docker run --shm-size 1g`, shm_size in compose, or `sudo mount -o remount,size=1g /dev/shm`",
        )
    free, needed = host.machine["memory_free"], host.slots * MEMORY_PER_RANK
    ranks = f"{host.slots} ranks, each of which takes {MEMORY_PER_RANK // MIB} MiB before it has a model"
    if free["cgroup"] < needed:
        limit = f"the memory limit of its container or cgroup leaves {free['cgroup'] / MIB:.0f} MiB"
        yield about.problem(f"on {host}, {limit} for {ranks}", "raise the limit (--memory, mem_limit, --mem)")
    elif free["machine"] < needed:
        text = f"on {host}, there are {free['machine'] / MIB:.0f} MiB for {ranks}"
        yield about.problem(text, "end other programs there")


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


def _users(first: HostFacts, host: HostFacts) -> Iterator[Finding]:
    mine, theirs = (f"{other.machine['user']} ({other.machine['user_id']}) on {other}" for other in (first, host))
    if first.machine["user_id"] != host.machine["user_id"]:
        yield About(Cause.HOST, first, host).warning(
            f"the job is user {mine} and {theirs}, so that neither may write the other's files on a shared disk",
            f"log in to {host} as a user of the same number: User in ~/.ssh/config",
        )

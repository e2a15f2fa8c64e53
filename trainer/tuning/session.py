"""A session of its own for each rank that `mpirun` starts, because Linux divides cores among sessions."""

from __future__ import annotations

import os
from pathlib import Path

_AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")


def take_own_session() -> bool:
    """Move this process, which leads its process group, to a session of its own; return whether it did.

    Where autogroup is on (sched(7)), Linux divides a core among the sessions that want it, and only then among their
    threads. A rank in a session of its own gets as much as all processes of a neighbour together; and where it yields,
    it yields to its own other thread, and doesn't lose its turn to the neighbour. `torchrun`, and Horovod's launcher
    over Gloo, start each rank in a session; `mpirun` starts all in its own.

    The process group keeps its number, by which `mpirun` ends the rank. Who reads from a terminal stays in its session,
    and so does who is nicer than others, which counts only within a session. PBS finds a job's processes by it.
    """
    if not _may_leave_its_session():
        return False
    try:
        _join_a_new_group()
        os.setsid()
    except OSError:  # as where its group has other processes, which it has started, or where it ignores SIGCHLD
        os.setpgid(0, os.getpid())
        return False
    return True


def _may_leave_its_session() -> bool:
    try:
        is_divided = _AUTOGROUP.read_text().strip() == "1"
    except OSError:
        return False
    leads_only_its_group = os.getpgrp() == os.getpid() != os.getsid(0)
    is_bound = os.isatty(0) or os.nice(0) != 0 or "PBS_JOBID" in os.environ
    return is_divided and leads_only_its_group and not is_bound


def _join_a_new_group() -> None:
    """Move this process to another group, because the leader of a group cannot leave its session.

    Not to its parent's: what is sent to the rank's group at this moment would reach `mpirun`.
    """
    leader = os.posix_spawn("/bin/sh", ["sh", "-c", ":"], {}, setpgroup=0)
    try:
        os.setpgid(0, leader)  # which stays a group's leader after its end, until it is waited for
    finally:
        os.waitpid(leader, 0)

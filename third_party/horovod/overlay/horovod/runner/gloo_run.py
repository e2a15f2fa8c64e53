"""Runs the ranks of a job over Gloo, each beside this process or behind ssh.

After Horovod's file of the same name, Copyright 2019 Uber Technologies, Inc., Apache License 2.0.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from horovod.runner.common.util import env as env_util
from horovod.runner.common.util import safe_shell_exec
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import KEY_VARIABLE, RendezvousServer
from horovod.runner.util import output, remote_exec, route, supervise
from horovod.runner.util.network import get_local_host_addresses, resolve_host_address
from horovod.runner.util.remote import get_remote_command
from horovod.runner.util.threads import execute_function_multithreaded, in_thread


class RankFailedError(RuntimeError):
    """The job ended because of a rank, whose exit code this has."""

    def __init__(self, number: int, exit_code: int) -> None:
        super().__init__(
            "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
            f"terminated. The first process to do so was: Process name: {number} Exit code: {exit_code}"
        )
        self.exit_code = exit_code


class Ending(threading.Event):
    """Set when the job is to end for another reason than a rank's."""

    signum = signal.SIGTERM

    def end_by(self, signum: int) -> None:
        self.signum = signal.Signals(signum)
        self.set()


@dataclass
class Job:
    """What all ranks of a job have in common."""

    settings: Any
    command: Sequence[str]
    env: Mapping[str, str]
    ending: Ending = field(default_factory=Ending)
    failed: threading.Event = field(default_factory=threading.Event)
    """Set when a rank has failed, which ends the others."""

    def __post_init__(self) -> None:
        self.env = {name: value for name, value in self.env.items() if env_util.is_exportable(name)}

    @property
    def is_ending(self) -> bool:
        return self.ending.is_set() or self.failed.is_set()


def rank_variables(slot: Any) -> dict[str, str]:
    """Return the variables that say which rank a process is."""
    return {
        "HOROVOD_HOSTNAME": str(slot.hostname),
        "HOROVOD_RANK": str(slot.rank),
        "HOROVOD_SIZE": str(slot.size),
        "HOROVOD_LOCAL_RANK": str(slot.local_rank),
        "HOROVOD_LOCAL_SIZE": str(slot.local_size),
        "HOROVOD_CROSS_RANK": str(slot.cross_rank),
        "HOROVOD_CROSS_SIZE": str(slot.cross_size),
        # Else what a rank prints arrives late, through a pipe.
        "PYTHONUNBUFFERED": "1",
    }


def network_variables(nics: set[str], port: int, host: str) -> dict[str, str]:
    """Return the variables by which a host's ranks find the rendezvous and each other."""
    names = route.names_on(nics, host)
    variables = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": route.launcher_address(nics, host),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": names[0],
    }
    if not os.environ.get("NCCL_SOCKET_IFNAME"):
        variables["NCCL_SOCKET_IFNAME"] = route.for_nccl(names)
    return variables


def run_rank(job: Job, slot: Any, variables: Mapping[str, str]) -> tuple[int, float]:
    """Run a rank to its end; return its exit code and the time of that end."""
    stdin = remote_exec.encode(" ".join(["env", *map(shlex.quote, job.command)]), {**job.env, **variables})
    command = _command_for(job.settings, slot.hostname)
    if job.settings.verbose:
        print(shlex.join(job.command))
        print(command)
    try:
        exit_code = _execute(job, slot.rank, command, stdin)
        # After a signal to the launcher, the line says nothing.
        if exit_code and not job.ending.is_set():
            output.print_if_read(f"Process {slot.rank} exit with status code {exit_code} on host {slot.hostname}.")
    except Exception as error:
        output.print_if_read(f"Exception happened during safe_shell_exec, exception message: {error}")
        exit_code = 1
    if exit_code:
        if not job.is_ending:
            output.print_if_read(f"Terminating remaining workers after failure of Process {slot.rank}.")
        job.failed.set()
    return exit_code, time.time()


def _command_for(settings: Any, host: str) -> str:
    """Return the command that takes a rank's command and environment from its stdin, where any user may see it."""
    command = shlex.join([sys.executable, "-m", "horovod.runner.util.remote_exec", str(Path.cwd())])
    if resolve_host_address(host) in get_local_host_addresses():
        return command
    port, identity_file = settings.ssh_port, settings.ssh_identity_file
    return str(get_remote_command(shlex.quote(command), host=host, port=port, identity_file=identity_file))


def _execute(job: Job, rank: int, command: str, stdin: bytes) -> int:
    with ExitStack() as stack:
        streams: dict[str, list[TextIO]] = {"stdout": [sys.stdout], "stderr": [sys.stderr]}
        if job.settings.output_filename:
            width = len(str(job.settings.num_proc - 1))
            folder = Path(job.settings.output_filename, f"rank.{rank:0{width}}")
            folder.mkdir(exist_ok=True)
            for name, sinks in streams.items():
                sinks.append(stack.enter_context((folder / name).open("w")))
        return int(
            safe_shell_exec.execute(
                command,
                stdin=stdin,
                index=rank,
                events=[job.ending, job.failed],
                # As mpirun ends, and any program that writes to `| head -1`.
                on_broken_pipe=lambda: job.ending.end_by(signal.SIGPIPE),
                prefix_output_with_timestamp=job.settings.prefix_output_with_timestamp,
                **streams,
            )
        )


def _end_on_signals(ending: Ending) -> None:
    # Python's tracker of semaphores warns when a signal ends this process while it frees one.
    sys.warnoptions.append("ignore::UserWarning:multiprocessing.resource_tracker")

    def end(signum: int, _: FrameType | None) -> None:
        ending.end_by(signum)

    for signum in supervise.endings():
        signal.signal(signum, end)


def gloo_run(settings: Any, nics: set[str], env: Mapping[str, str], command: Sequence[str]) -> None:
    """Run a job to its end.

    Args:
        settings: Horovod's, with the number of processes and the hosts.
        nics: the interfaces to use, as `get_common_interfaces` returns them.
        env: what the ranks get, over their stdin.
        command: what each of them runs.

    Raises:
        RankFailedError: a rank ended with another code than 0; the others have been ended.
        supervise.EndedError: a signal has ended the job, or nobody reads what it prints.
    """
    if settings.output_filename:
        Path(settings.output_filename).mkdir(parents=True, exist_ok=True)
    plan = get_host_assignments(parse_hosts(settings.hosts), settings.num_proc)
    rendezvous = RendezvousServer(plan, route.launcher_addresses(nics))
    job = Job(settings, command, {**env, KEY_VARIABLE: rendezvous.key})
    _end_on_signals(job.ending)
    if supervise.has_exec_client():
        in_thread(supervise.end_with_client)
    arguments = [
        [job, slot, rank_variables(slot) | network_variables(nics, rendezvous.port, slot.hostname)] for slot in plan
    ]
    ends = execute_function_multithreaded(run_rank, arguments, block_until_all_done=True)
    in_order = sorted(ends.items(), key=lambda item: item[1][1])
    failed = [(number, exit_code) for number, (exit_code, _) in in_order if exit_code]
    if job.ending.is_set() and (failed or job.ending.signum == signal.SIGPIPE):
        raise supervise.EndedError(job.ending.signum)
    if failed:
        raise RankFailedError(*failed[0])

"""Start a job on its hosts with its launcher."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.cluster.environment import SECRET
from trainer.cluster.launchers import STARTS
from trainer.cluster.processes import end_with_parent
from trainer.errors import ConfigError
from trainer.ops.supervise.hosts import SSH, Host, names, slots_of
from trainer.ops.supervise.options import Options, Streams
from trainer.watch.job_folder import JOB

_PORTS = range(20000, 32000)
"""Below the ports that a kernel gives to clients."""
# Variables that belong to this host or to this shell, and are not for other hosts.
_PRIVATE = {"DISPLAY", "HOME", "HOSTNAME", "LOGNAME", "OLDPWD", "PWD", "SHELL", "SHLVL", "USER", "_"}
# mpirun then keeps to itself that a rank has failed, which `trainer run` says in a line. Ranks do not get it: what goes
# wrong within MPI they have to say.
_QUIET = "OMPI_MCA_orte_execute_quiet"
# What another host's shell reads. The environment stands before it in the same input, because other users can read
# command lines. When ssh ends, the input ends, and with it the job.
_ON_HOST = """\
cd {folder} || exit 127
exec 3<&0
{command} < /dev/null &
job=$!
(while read -r _; do :; done; kill "$job") <&3 > /dev/null 2>&1 &
watch=$!
wait "$job"
code=$?
kill "$watch" 2> /dev/null
exit "$code"
"""


@dataclass(frozen=True)
class Start:
    """A process to start on this host."""

    command: tuple[str, ...]
    script: str = ""
    """What it reads from its standard input, which then stays open; where it is empty, it gets our standard input."""


def launch(options: Options, hosts: Sequence[Host], job: str) -> list[subprocess.Popen[bytes]]:
    """Start the job's command on all slots of these hosts.

    Raises:
        ConfigError: the launcher, or ssh, is not installed.
    """
    environment = {**environment_for(job), **options.environment}
    launcher = STARTS[options.launcher]
    if launcher.reaches_hosts:
        of_launcher = launcher.starts[options.launcher]
        ranks = ("-np", str(slots_of(hosts)), "-H", names(hosts))
        environment = {_QUIET: "1", **environment}
        starts = [Start((launcher.name, *of_launcher, *ranks, "env", "-u", _QUIET, *options.command))]
    else:
        starts = torchrun(hosts, options.command, environment)
    for start in starts:
        if shutil.which(start.command[0], path=environment["PATH"]) is None:
            other = "; the launcher torchrun comes with PyTorch" if launcher.reaches_hosts else ""
            raise ConfigError(f"{start.command[0]} is not installed{other}")
    return [_popen(start, environment, options.streams) for start in starts]


def environment_for(job: str) -> dict[str, str]:
    """Return the environment of a job: the caller's, so that `python` is what it is in the caller's shell.

    Where this interpreter's programs are not on the PATH, because its environment is not activated, they come first.
    """
    path, tools = os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)
    if tools not in path.split(os.pathsep):
        path = f"{tools}{os.pathsep}{path}"
    # Open MPI's daemons on other hosts would carry no mark.
    agent = {"OMPI_MCA_orte_launch_agent": f"env {JOB}={job} orted"}
    # A new secret at every start. It reaches the ranks as the rest of the environment does, on no command line.
    return {**agent, **os.environ, "PATH": path, JOB: job, SECRET: secrets.token_hex(32)}


def torchrun(hosts: Sequence[Host], command: Sequence[str], environment: Mapping[str, str]) -> list[Start]:
    """Return an agent of torchrun for each host; their rendezvous is a port of the first host.

    It is the static one: the agents of c10d load pickles from the store, which asks nobody who they are. Without `--`,
    torchrun would take the script's options for its own where they abbreviate one, as --log does.
    """
    is_alone = len(hosts) == 1 and hosts[0].is_here
    first = "127.0.0.1" if is_alone else socket.gethostname() if hosts[0].is_here else hosts[0].name
    rendezvous = (
        f"--rdzv-backend static --master-addr {first} --master-port {_free_port()} --rdzv-id {environment[JOB]}"
    )
    common = f"-m torch.distributed.run --max-restarts 0 --no-python {rendezvous} --nnodes {len(hosts)}".split()
    starts = []
    for number, host in enumerate(hosts):
        place = ("--node-rank", str(number), "--nproc-per-node", str(host.slots))
        agent = (sys.executable, *common, *place, "--", *command)
        starts.append(Start(agent) if host.is_here else through_ssh(host, agent, environment))
    return starts


def _free_port() -> int:
    """Return a port that nobody listens on here; on another host it is free in all likelihood."""
    while True:
        port = secrets.choice(_PORTS)
        with suppress(OSError), socket.create_server(("", port)):
            return port


def through_ssh(host: Host, command: Sequence[str], environment: Mapping[str, str]) -> Start:
    """Return the start of a command on another host, in this folder and with this environment."""
    exported = [
        f"export {name}={shlex.quote(value)}"
        for name, value in environment.items()
        if name.isidentifier() and name not in _PRIVATE and not name.startswith("SSH_")
    ]
    script = _ON_HOST.format(folder=shlex.quote(str(Path.cwd())), command=shlex.join(command))
    return Start((*SSH, host.name, "sh -s"), "\n".join([*exported, script]))


def _popen(start: Start, environment: Mapping[str, str], streams: Streams) -> subprocess.Popen[bytes]:
    parent = os.getpid()

    def prepare() -> None:
        end_with_parent(signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    process = subprocess.Popen(
        start.command,
        env=environment,
        preexec_fn=prepare,
        stdin=subprocess.PIPE if start.script else streams[0],
        stdout=streams[1],
        stderr=streams[2],
    )
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.write(start.script.encode())
            process.stdin.flush()
    return process

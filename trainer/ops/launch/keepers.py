"""The folder of a launch on each of its hosts: how the function gets there, the outcomes back, and all is removed."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.errors import TrainerError
from trainer.ops.launch.outcome import CALL
from trainer.ops.supervise.hosts import Host
from trainer.ops.supervise.remote import SCRIPT

_KEEP = f"""\
trap '' HUP INT TERM PIPE
umask 077
kept=$1 size=$2
shift 2
mkdir "$kept" || {{ [ -O "$kept" ] && [ ! -L "$kept" ] && echo ready; exit; }}
head -c "$size" > "$kept/{CALL}" && echo ready || {{ rm -rf "$kept"; exit 1; }}
read -r _ || {{ rm -rf "$kept"; sleep 5; }}
(
{SCRIPT}
) > /dev/null 2>&1
cat "$kept"/outcome-* 2> /dev/null
rm -rf "$kept"
"""
"""Keeps the folder of a launch until its input ends, however its caller ends.

If the folder is there already, the host is known under another name as well, and has a keeper. Where no line says that
the job is over, the caller was killed: then nobody wants the outcomes, and the folder goes first. The launcher, which
ends with the caller, gets time to end its ranks, and what is left is killed. Without a reader of its output, a shell
would end at the first word that it prints.
"""
# A host that loses power meanwhile is given up after three times that many seconds.
_OPTIONS = ("-o", "ServerAliveInterval=10")


class Keepers:
    """A shell on each host, which keeps the folder of a launch there until this process ends or calls `collect`.

    Args:
        hosts: all hosts of the job.
        job: its id.
    """

    def __init__(self, hosts: Sequence[Host], job: str) -> None:
        self._hosts = hosts
        # The same path on all hosts: the others may lack this one's folder for temporary files.
        parent = tempfile.gettempdir() if all(host.is_here for host in hosts) else "/tmp"  # noqa: S108 (made with 0700)
        self._job, self.folder = job, Path(parent, f"trainer-launch-{job}")
        self._shells: list[subprocess.Popen[bytes]] = []

    @contextmanager
    def keep(self, call: bytes) -> Iterator[None]:
        """Context in which the function is on all hosts.

        Raises:
            TrainerError: a host cannot be reached, or cannot take it.
        """
        try:
            for host in self._hosts:
                try:
                    self._shells.append(self._start(host, len(call)))
                except OSError as error:  # there is no ssh
                    raise TrainerError(f"the function cannot be sent to host {host.name}: {error}") from None
            for host, shell in zip(self._hosts, self._shells, strict=True):
                self._send(host, shell, call)
            yield
        finally:
            self.collect()

    def collect(self) -> bytes:
        """Return the outcomes of all ranks one after another, without those of a host that does not answer."""
        shells, self._shells = self._shells, []
        try:
            return b"".join(shell.communicate(b"end\n")[0] for shell in shells)
        finally:
            for shell in shells:
                _close_input(shell)

    def _start(self, host: Host, size: int) -> subprocess.Popen[bytes]:
        folders = sorted({tempfile.gettempdir(), "/tmp"})  # noqa: S108 (of another host)
        command = ["sh", "-c", _KEEP, "sh", str(self.folder), str(size), self._job, "kill", *folders]
        pipe = subprocess.PIPE
        # In its own session: Ctrl-C reaches the caller alone, which then ends the job and the keepers in this order.
        return subprocess.Popen(
            host.command(command, _OPTIONS), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )

    @staticmethod
    def _send(host: Host, shell: subprocess.Popen[bytes], call: bytes) -> None:
        if shell.stdin is None or shell.stdout is None or shell.stderr is None:
            return
        try:
            shell.stdin.write(call)
            shell.stdin.flush()
        except BrokenPipeError:  # of a host with another keeper; what is left in the buffer would be sent at each close
            _close_input(shell)
        answer = shell.stdout.readline()
        if answer != b"ready\n":
            if answer:  # of something else that the host starts with each shell, which would mix with the outcomes
                shell.kill()
            _close_input(shell)
            problem = shell.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
            why = problem or f"ssh has ended with code {shell.wait()}"
            raise TrainerError(f"the function cannot be sent to host {host.name}: {why}")


def _close_input(shell: subprocess.Popen[bytes]) -> None:
    if shell.stdin is not None:
        with suppress(OSError):  # there may be something that nobody has read
            shell.stdin.close()
        shell.stdin = None

"""Two hosts on this machine: network namespaces with names and addresses of their own, of which one can be cut off."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ADDRESSES = {"hang-a": "10.77.31.1", "hang-b": "10.77.31.2"}
NETWORK = "10.77.31.0/24"
CUT_OFF = "iptables -I INPUT -i hang+ -j DROP && iptables -I OUTPUT -o hang+ -j DROP"
"""Run on a host, takes its network away without a word to anybody."""
# Takes the place of ssh, whose options may also come behind the host: calls the command on that host of this machine.
_SSH = """#!/bin/sh
host=
while :; do
    case "$1" in
    -o | -p | -i | -l) shift 2 ;;
    -*) shift ;;
    *)
        [ -z "$host" ] || break
        host=$1
        shift
        ;;
    esac
done
exec ip netns exec "$host" unshare --uts sh -c 'hostname "$0"; exec sh -c "$1"' "$host" "$*"
"""


@contextmanager
def hosts(folder: Path) -> Iterator[dict[str, str]]:
    """Context with both hosts; yields what their environment needs, in which `ssh` leads from one to the other.

    A machine has them once: another process that wants them waits until they are gone.
    """
    with Path("/run/trainer-two-hosts.lock").open("w") as lock:  # where nobody but root plants a link
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting: another program uses the two hosts of this machine", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield from _made(folder)


def _made(folder: Path) -> Iterator[dict[str, str]]:
    programs = folder / "bin"
    programs.mkdir(parents=True)
    ssh = programs / "ssh"
    ssh.write_text(_SSH)
    ssh.chmod(0o755)
    _remove()
    ends = [end_of(name) for name in ADDRESSES]
    try:
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for (name, address), end in zip(ADDRESSES.items(), ends, strict=True):
            _ip("netns", "add", name)
            etc = Path("/etc/netns", name)
            etc.mkdir(parents=True, exist_ok=True)
            lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in ADDRESSES.items())]
            (etc / "hosts").write_text("\n".join(lines) + "\n")
            _ip("link", "set", end, "netns", name)
            for words in (
                ("addr", "add", f"{address}/24", "dev", end),
                ("link", "set", end, "up"),
                ("link", "set", "lo", "up"),
            ):
                _ip("-n", name, *words)
        path = f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        yield {"CUT_OFF": CUT_OFF, "TRAINER_NETWORK": NETWORK, "PATH": path}
    finally:
        _remove()


def end_of(host: str) -> str:
    """Return the host's end of the link."""
    return host.replace("-", "-v")


def on_host(name: str, command: Sequence[str]) -> list[str]:
    """Return the command that runs another one on a host."""
    inside = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', name, *command]
    return ["ip", "netns", "exec", name, *inside]


def horovodrun_on_both(per_host: int, *options: str) -> list[str]:
    """Return the command that starts so many ranks on each host; a caller adds theirs."""
    slots = ",".join(f"{name}:{per_host}" for name in ADDRESSES)
    return on_host(next(iter(ADDRESSES)), ["horovodrun", *options, "-np", str(2 * per_host), "-H", slots])


def torchrun_on_both(per_host: int, torchrun: Sequence[str] = ("torchrun",)) -> list[list[str]]:
    """Return the commands of both hosts, to each of which a caller adds the ranks' command."""
    nodes = [*torchrun, "--nnodes", "2", "--nproc-per-node", str(per_host), "--rdzv-backend", "static"]
    nodes += ["--master-addr", next(iter(ADDRESSES.values()))]
    return [on_host(name, [*nodes, "--node-rank", str(number)]) for number, name in enumerate(ADDRESSES)]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _remove() -> None:
    for name in ADDRESSES:
        with suppress(subprocess.CalledProcessError):
            _ip("netns", "del", name)
        etc = Path("/etc/netns", name)
        (etc / "hosts").unlink(missing_ok=True)
        with suppress(OSError):
            etc.rmdir()
    for name in ADDRESSES:
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", end_of(name))

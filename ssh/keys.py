"""The keys of a cluster: made once, at start, in a folder that only its nodes see.

    id_ed25519, id_ed25519.pub              the cluster's one pair: who has it may log in to every node
    nodes/NAME/ssh_host_ed25519_key, .pub   what node NAME shows of itself
    known_hosts                             every node's public key, pinned to its name

On one machine the folder is a volume that all nodes share. On several, each has its own: `create` fills the first,
`write_part` and `read_part` carry to another what that one node needs. Only the standard library, and ssh-keygen.
"""

from __future__ import annotations

import fcntl
import io
import os
import re
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

CLUSTER_KEY = "id_ed25519"
HOST_KEY = "ssh_host_ed25519_key"
KNOWN_HOSTS = "known_hosts"
# RFC 1123's host names, so that a name can be a folder and a line of known_hosts.
_NAME = r"[A-Za-z0-9]([A-Za-z0-9.-]{0,62}[A-Za-z0-9])?"
_IN_A_PART = re.compile(rf"{CLUSTER_KEY}(\.pub)?|{KNOWN_HOSTS}|nodes/{_NAME}/{HOST_KEY}(\.pub)?")
_LARGEST_FILE_BYTES = 1024 * 1024


class NodeError(Exception):
    """Something that the person at the keyboard can mend; its text is the whole message."""


def create(folder: Path, names: Sequence[str], port: int) -> None:
    """Makes what is missing: the cluster's pair, a host key for each of `names`, and known_hosts with all of them.

    Several nodes may call it at the same time on the same folder. What is there already stays.

    Raises:
        NodeError: a name is no host name, or the folder cannot be written.
    """
    for name in names:
        if not re.fullmatch(_NAME, name):
            raise NodeError(f"{name!r} is no host name; valid are letters, digits, '-' and '.', as in node-1")
    with _locked(folder):
        _make_pair(folder / CLUSTER_KEY, "trainer cluster")
        for name in names:
            _make_pair(folder / "nodes" / name / HOST_KEY, name)
        _pin(folder, port)


def write_part(folder: Path, name: str, stream: BinaryIO) -> None:
    """Writes what node `name` needs to `stream`, as a tar archive. It holds private keys: pass it through ssh.

    Raises:
        NodeError: there are no keys for this name.
    """
    own = f"nodes/{name}/{HOST_KEY}"
    members = [CLUSTER_KEY, f"{CLUSTER_KEY}.pub", KNOWN_HOSTS, own, f"{own}.pub"]
    if not re.fullmatch(_NAME, name) or not (folder / own).is_file():
        known = ", ".join(node_names(folder)) or "none; make them with: trainer-node keys create NAME NAME"
        raise NodeError(f"there are no keys for node {name!r}; valid are {known}")
    with tarfile.open(fileobj=stream, mode="w|") as archive:
        for member in members:
            archive.add(folder / member, arcname=member)


def read_part(folder: Path, stream: BinaryIO) -> list[str]:
    """Puts what `write_part` wrote into `folder`, and returns the names of the nodes that it is for.

    Raises:
        NodeError: it is not what `write_part` writes, or there are other keys already. Nothing is written then.
    """
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                if not member.isfile() or not _IN_A_PART.fullmatch(member.name) or member.size > _LARGEST_FILE_BYTES:
                    raise NodeError(f"the archive holds {member.name!r}, which is no part of a cluster's keys")
                content = archive.extractfile(member)
                files[member.name] = content.read() if content else b""
    except (tarfile.TarError, EOFError) as error:
        raise NodeError(f"stdin is not what `trainer-node keys export NAME` writes: {error}") from None
    missing = {CLUSTER_KEY, f"{CLUSTER_KEY}.pub", KNOWN_HOSTS} - files.keys()
    if missing:
        raise NodeError(f"stdin is not what `trainer-node keys export NAME` writes: no {', '.join(sorted(missing))}")
    with _locked(folder):
        old = folder / CLUSTER_KEY
        if old.exists() and old.read_bytes() != files[CLUSTER_KEY]:
            raise NodeError(f"{folder} holds the keys of another cluster; empty it first")
        for name, data in files.items():
            write_private(folder / name, data)
    return sorted({name.split("/")[1] for name in files if name.startswith("nodes/")})


def node_names(folder: Path) -> list[str]:
    """The nodes whose public keys this folder has."""
    return sorted(path.parent.name for path in folder.glob(f"nodes/*/{HOST_KEY}.pub"))


def pinned_names(folder: Path) -> list[str]:
    """The nodes that known_hosts names, in its order."""
    return list(_pinned(folder))


def _pinned(folder: Path) -> dict[str, str]:
    """The lines of known_hosts by the names of the nodes."""
    try:
        lines = (folder / KNOWN_HOSTS).read_text().splitlines()
    except OSError:
        return {}
    return {match[1]: line for line in lines if (match := re.match(r"\[([^]]+)\]:\d+ ", line))}


def write_private(path: Path, data: bytes) -> None:
    """Whole or not at all, and never readable by others in between."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with io.FileIO(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(data)
    partial.rename(path)


def _pin(folder: Path, port: int) -> None:
    # Nodes on other machines are known by their lines alone: their keys are not in this folder.
    lines = _pinned(folder)
    for name in node_names(folder):
        kind, key = (folder / "nodes" / name / f"{HOST_KEY}.pub").read_text().split()[:2]
        lines[name] = f"[{name}]:{port} {kind} {key}"
    write_private(folder / KNOWN_HOSTS, "".join(f"{lines[name]}\n" for name in sorted(lines)).encode())


def _make_pair(path: Path, comment: str) -> None:
    if path.exists() and path.with_name(f"{path.name}.pub").exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # half a pair, from a start that was cut off; ssh-keygen would ask
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise NodeError(f"ssh-keygen could not make {path}: {(done.stderr or done.stdout).strip()}")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise NodeError(
            f"{folder}, where the cluster's keys belong, cannot be written by user {os.getuid()}: {error.strerror}"
        ) from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

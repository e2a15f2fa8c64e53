"""SSH keys of a cluster, generated once at start in a folder that only its nodes can read.

    id_ed25519, id_ed25519.pub              the cluster's key pair: it allows a login to every node
    nodes/NAME/ssh_host_ed25519_key, .pub   host key of node NAME
    known_hosts                             public host keys of all nodes, pinned to their names

On one machine the folder is a volume that all nodes share. On several machines each has its own folder: `create` fills
the first one, and `export_keys` and `import_keys` copy to another machine the keys that its node needs. Keys are
generated with ssh-keygen.
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

from trainer.errors import TrainerError

CLUSTER_KEY = "id_ed25519"
HOST_KEY = "ssh_host_ed25519_key"
KNOWN_HOSTS = "known_hosts"
# A host name as in RFC 1123. It is safe as a folder's name and in a line of known_hosts.
_NAME = r"[A-Za-z0-9]([A-Za-z0-9.-]{0,62}[A-Za-z0-9])?"
_EXPORTED = re.compile(rf"{CLUSTER_KEY}(\.pub)?|{KNOWN_HOSTS}|nodes/{_NAME}/{HOST_KEY}(\.pub)?")
_LARGEST_FILE_BYTES = 1024 * 1024


def create(folder: Path, names: Sequence[str], port: int) -> None:
    """Generate the cluster's key pair, a host key for each of `names`, and known_hosts; keep keys that exist.

    Several nodes may call it at the same time on the same folder.

    Raises:
        TrainerError: a name is not a valid host name, or the folder cannot be written.
    """
    for name in names:
        if not re.fullmatch(_NAME, name):
            raise TrainerError(f"{name!r} is not a host name; valid are letters, digits, '-' and '.', as in node-1")
    with _locked(folder):
        _generate_pair(folder / CLUSTER_KEY, "trainer cluster")
        for name in names:
            _generate_pair(folder / "nodes" / name / HOST_KEY, name)
        _pin(folder, port)


def export_keys(folder: Path, name: str, stream: BinaryIO) -> None:
    """Write the keys that node `name` needs to `stream`, as a tar archive. It holds private keys: send it over ssh.

    Raises:
        TrainerError: there are no keys for this name.
    """
    own = f"nodes/{name}/{HOST_KEY}"
    members = [CLUSTER_KEY, f"{CLUSTER_KEY}.pub", KNOWN_HOSTS, own, f"{own}.pub"]
    if not re.fullmatch(_NAME, name) or not (folder / own).is_file():
        known = ", ".join(node_names(folder)) or "none; create them with: trainer-node keys create NAME NAME"
        raise TrainerError(f"there are no keys for node {name!r}; valid are {known}")
    with tarfile.open(fileobj=stream, mode="w|") as archive:
        for member in members:
            archive.add(folder / member, arcname=member)


def import_keys(folder: Path, stream: BinaryIO) -> list[str]:
    """Write an archive of `export_keys` into `folder`; return the names of the nodes whose host keys it holds.

    Raises:
        TrainerError: the archive was not written by `export_keys`, or the folder holds the keys of another cluster.
            Nothing is written then.
    """
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                if not member.isfile() or not _EXPORTED.fullmatch(member.name) or member.size > _LARGEST_FILE_BYTES:
                    raise TrainerError(f"the archive holds {member.name!r}, which is not one of a cluster's keys")
                content = archive.extractfile(member)
                files[member.name] = content.read() if content else b""
    except (tarfile.TarError, EOFError) as error:
        raise TrainerError(f"stdin is not the output of `trainer-node keys export NAME`: {error}") from None
    missing = {CLUSTER_KEY, f"{CLUSTER_KEY}.pub", KNOWN_HOSTS} - files.keys()
    if missing:
        raise TrainerError(
            f"stdin is not the output of `trainer-node keys export NAME`: no {', '.join(sorted(missing))}"
        )
    with _locked(folder):
        old = folder / CLUSTER_KEY
        if old.exists() and old.read_bytes() != files[CLUSTER_KEY]:
            raise TrainerError(f"{folder} holds the keys of another cluster; empty it first")
        for name, data in files.items():
            write_private(folder / name, data)
    return sorted({name.split("/")[1] for name in files if name.startswith("nodes/")})


def node_names(folder: Path) -> list[str]:
    """Return the nodes whose public host keys are in this folder."""
    return sorted(path.parent.name for path in folder.glob(f"nodes/*/{HOST_KEY}.pub"))


def pinned_names(folder: Path) -> list[str]:
    """Return the nodes in known_hosts, in its order."""
    return list(_pinned_lines(folder))


def _pinned_lines(folder: Path) -> dict[str, str]:
    """Return the lines of known_hosts by node name."""
    try:
        lines = (folder / KNOWN_HOSTS).read_text().splitlines()
    except OSError:
        return {}
    return {match[1]: line for line in lines if (match := re.match(r"\[([^]]+)\]:\d+ ", line))}


def write_private(path: Path, data: bytes) -> None:
    """Write a file atomically, with mode 600 from the start."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with io.FileIO(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(data)
    partial.rename(path)


def _pin(folder: Path, port: int) -> None:
    # Keep existing lines: the host keys of nodes on other machines are not in this folder.
    lines = _pinned_lines(folder)
    for name in node_names(folder):
        kind, key = (folder / "nodes" / name / f"{HOST_KEY}.pub").read_text().split()[:2]
        lines[name] = f"[{name}]:{port} {kind} {key}"
    write_private(folder / KNOWN_HOSTS, "".join(f"{lines[name]}\n" for name in sorted(lines)).encode())


def _generate_pair(path: Path, comment: str) -> None:
    if path.exists() and path.with_name(f"{path.name}.pub").exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # left by an interrupted start; ssh-keygen would prompt before it overwrites it
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise TrainerError(f"ssh-keygen could not generate {path}: {(done.stderr or done.stdout).strip()}")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise TrainerError(
            f"{folder}, the folder of the cluster's keys, cannot be written by user {os.getuid()}: {error.strerror}"
        ) from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

#!/usr/bin/env python3
"""Run a node of the cluster: set up its SSH keys, and start sshd for the cluster's other nodes.

    trainer-node serve                   set up the node and run sshd; the container's command
    trainer-node health                  check that sshd answers and Horovod can be imported, for Docker's HEALTHCHECK
    trainer-node keys create NAME NAME   on the first of several machines: generate keys for all nodes
    trainer-node keys export NAME        write the keys that node NAME needs to stdout, as a tar archive
    trainer-node keys import             read such an archive from stdin

Environment variables, with their defaults:

    TRAINER_NODE         name of this node in `horovodrun -H` (the host name)
    TRAINER_SSH_PORT     port of sshd, the same on all nodes (2222)
    TRAINER_LISTEN       address that sshd listens on (this host's address on the route to the other nodes; without
                         other nodes, the address of its own name)
    TRAINER_CLUSTER_DIR  folder of the keys (/cluster)
"""

# Docker runs this file every few seconds as the health check, so it must not import PyTorch.

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import keys

from trainer.cluster.network import route_to
from trainer.errors import TrainerError

HERE = Path(__file__).resolve().parent
SSHD = "/usr/sbin/sshd"
# Variables of this container that every process started over ssh needs too. Other variables that a user exports reach
# the ranks through horovodrun, which passes its own environment on.
_FORWARDED = ("PATH", "LD_LIBRARY_PATH", "TRAINER_", "OPAL_", "OMPI_", "NCCL_", "HOROVOD_", "OMP_", "UCX_", "NVIDIA_")
# Its modification time is that of the last successful check. The import of Horovod takes seconds of CPU time, which
# training may need, so it is checked once. sshd logs two lines for every connection, so it is checked once a minute.
_HEALTHY = Path("/tmp/trainer-healthy")  # noqa: S108 (an empty file in the container's own /tmp)
_HEALTHY_FOR_S = 60.0


def main() -> int:
    options = _parse_args()
    try:
        if options.command == "serve":
            serve()
        elif options.command == "health":
            check_health()
        elif options.action == "create":
            create_keys(options.names)
        elif options.action == "export":
            if sys.stdout.isatty():
                raise TrainerError(
                    "this would print private keys on the terminal; pipe it into `trainer-node keys import` on the "
                    "other machine"
                )
            keys.export_keys(_cluster_dir(), options.name, sys.stdout.buffer)
        else:
            names = keys.import_keys(_cluster_dir(), sys.stdin.buffer)
            print(f"trainer: keys for node {', '.join(names)} are in {_cluster_dir()}")
    except TrainerError as error:
        print(f"trainer: {error}", file=sys.stderr)
        return 1
    return 0


def serve() -> None:
    """Write the keys and settings of ssh and sshd, then replace this process with sshd. Never returns.

    Raises:
        TrainerError: keys or settings cannot be written, or the address to listen on cannot be found.
    """
    folder, name, port = _cluster_dir(), node_name(), _port()
    _HEALTHY.unlink(missing_ok=True)
    keys.create(folder, [name], port)
    home = Path.home() / ".ssh"
    try:
        home.mkdir(mode=0o700, exist_ok=True)
        home.chmod(0o700)
        _copy_keys(folder, name, home)
        _write_settings(folder, home, port, listen_address(folder, name))
    except OSError as error:
        raise TrainerError(f"cannot set up ssh in {home}: {error}") from None
    check = subprocess.run([SSHD, "-t", "-f", str(home / "sshd_config")], capture_output=True, text=True, check=False)
    if check.returncode != 0:
        raise TrainerError(f"sshd rejects its settings: {check.stderr.strip()}")
    print(f"trainer: node {name} listens on port {port}", file=sys.stderr, flush=True)
    os.execv(SSHD, [SSHD, "-D", "-e", "-f", str(home / "sshd_config")])  # noqa: S606 (needs no shell)


def check_health() -> None:
    """Check that sshd answers and that Horovod can be imported.

    Raises:
        TrainerError: sshd does not answer, or the import fails.
    """
    checked = _HEALTHY.stat().st_mtime if _HEALTHY.exists() else None
    if checked and time.time() - checked < _HEALTHY_FOR_S:
        return
    address, port = _configured_address(Path.home() / ".ssh" / "sshd_config"), _port()
    try:
        with socket.create_connection((address, port), timeout=5) as connection:
            banner = connection.recv(64)
    except OSError as error:
        raise TrainerError(f"sshd does not answer on {address} port {port}: {error}") from None
    if not banner.startswith(b"SSH-2.0-"):
        raise TrainerError(f"the server on {address} port {port} is not sshd: it sent {banner!r}")
    if not checked:
        command = [sys.executable, "-c", "import horovod.torch"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise TrainerError(f"horovod.torch cannot be imported: {done.stderr.strip()[-500:]}")
    _HEALTHY.touch()


def create_keys(names: list[str]) -> None:
    """Generate the keys of a cluster on several machines, and print the commands that copy them."""
    folder = _cluster_dir()
    keys.create(folder, names, _port())
    print(f"trainer: keys for {', '.join(names)} are in {folder}. Copy each node's keys to its machine:")
    for name in names:
        print(f"    … trainer-node keys export {name} | ssh MACHINE … trainer-node keys import")


def node_name() -> str:
    """Return the name by which other nodes log in to this one."""
    return os.environ.get("TRAINER_NODE") or socket.gethostname()


def listen_address(folder: Path, name: str) -> str:
    """Return this host's address on the cluster's network.

    Raises:
        TrainerError: there is no route to any other node, and this node's own name has no address but a loopback one.
    """
    chosen = os.environ.get("TRAINER_LISTEN")
    if chosen:
        return chosen
    for other in [*(node for node in keys.pinned_names(folder) if node != name), name]:
        address = route_to(other)
        if address and not address.startswith("127."):
            return address
    raise TrainerError(
        f"cannot tell which of this host's addresses is on the cluster's network: there is no route to another node, "
        f"and {name!r} has no address but a loopback one; set TRAINER_LISTEN to the address"
    )


def ssh_environment() -> str:
    """Return the value of sshd's SetEnv: the variables of every process that is started over ssh."""
    forwarded = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_FORWARDED) and value.isprintable() and '"' not in value
    }
    return " ".join(f'"{name}={value}"' for name, value in forwarded.items())


def _copy_keys(folder: Path, name: str, home: Path) -> None:
    """Copy this node's keys into its home, with the owner and the modes that ssh requires."""
    for source, target in (
        (folder / keys.CLUSTER_KEY, "id_ed25519"),
        (folder / "nodes" / name / keys.HOST_KEY, "host_key"),
    ):
        try:
            mode = source.stat().st_mode
            keys.write_private(home / target, source.read_bytes())
        except OSError as error:
            raise TrainerError(f"cannot read {source} as user {os.getuid()}: {error.strerror}") from None
        if mode & 0o077:
            print(f"trainer: WARNING: {source} had mode {mode & 0o777:o}; a private key's is 600", file=sys.stderr)
            try:
                source.chmod(0o600)
            except OSError as error:
                raise TrainerError(
                    f"{source} can be read by other users, and its mode cannot be changed: {error.strerror}"
                ) from None
    public = (folder / f"{keys.CLUSTER_KEY}.pub").read_text()
    keys.write_private(home / "authorized_keys", f"restrict {public}".encode())


def _write_settings(folder: Path, home: Path, port: int, address: str) -> None:
    server = [
        f"Port {port}",
        f"ListenAddress {address}",
        f"HostKey {home / 'host_key'}",
        f"AuthorizedKeysFile {home / 'authorized_keys'}",
        f"SetEnv {ssh_environment()}",
        f"Include {HERE / 'sshd_config'}",
    ]
    client = [
        f"Port {port}",
        f"IdentityFile {home / 'id_ed25519'}",
        f"UserKnownHostsFile {folder / keys.KNOWN_HOSTS}",
        f"Include {HERE / 'ssh_config'}",
    ]
    for name, lines in (("sshd_config", server), ("config", client)):
        keys.write_private(home / name, ("\n".join(lines) + "\n").encode())


def _configured_address(settings: Path) -> str:
    """Return the address that sshd listens on."""
    try:
        lines = settings.read_text().splitlines()
    except OSError as error:
        raise TrainerError(f"sshd has not been set up yet: {error}") from None
    return next(line.split()[1] for line in lines if line.startswith("ListenAddress "))


def _cluster_dir() -> Path:
    return Path(os.environ.get("TRAINER_CLUSTER_DIR") or "/cluster")


def _port() -> int:
    text = os.environ.get("TRAINER_SSH_PORT") or "2222"
    if not text.isdecimal() or not 1024 <= int(text) <= 65535:
        raise TrainerError(f"TRAINER_SSH_PORT is {text!r}; valid are 1024 to 65535")
    return int(text)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="trainer-node",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="serve|health|keys")
    commands.add_parser("serve")
    commands.add_parser("health")
    actions = commands.add_parser("keys").add_subparsers(dest="action", required=True, metavar="create|export|import")
    actions.add_parser("create").add_argument("names", nargs="+", metavar="NAME")
    actions.add_parser("export").add_argument("name", metavar="NAME")
    actions.add_parser("import")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/python3
"""A node of the cluster: makes or finds its keys, and lets this cluster's other nodes in through sshd.

    trainer-node serve                   what a node's container runs
    trainer-node health                  whether sshd answers and Horovod loads, for Docker's HEALTHCHECK
    trainer-node keys create NAME NAME   keys for nodes on several machines, made on the first
    trainer-node keys export NAME        what node NAME needs of them, to stdout, as a tar archive
    trainer-node keys import             the same from stdin

Environment: TRAINER_NODE, this node's name in `horovodrun -H` (the host name); TRAINER_SSH_PORT (2222), the same on
all nodes; TRAINER_LISTEN, the address that sshd listens on (the one on the way to the other nodes, else the one that
the node's name stands for); TRAINER_CLUSTER_DIR, the keys' folder (/cluster). Only the standard library.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import keys
from keys import NodeError

HERE = Path(__file__).resolve().parent
SSHD = "/usr/sbin/sshd"
# Of this container's environment, what a process started over ssh needs as well. What else a user exports travels
# with the job: horovodrun hands its own environment on.
_FOR_EVERY_LOGIN = (
    "PATH",
    "LD_LIBRARY_PATH",
    "TRAINER_",
    "OPAL_",
    "OMPI_",
    "NCCL_",
    "HOROVOD_",
    "OMP_",
    "UCX_",
    "NVIDIA_",
)
# When all was well last. Importing Horovod takes seconds of a core that may be training, so that is done once; and
# sshd writes two lines about everybody who only looks, so that is done once a minute.
_HEALTHY = Path("/tmp/trainer-healthy")  # noqa: S108 (an empty mark, in the container's own /tmp)
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
                raise NodeError(
                    "this would print private keys on the terminal; pipe it into the other machine's import"
                )
            keys.write_part(_cluster_dir(), options.name, sys.stdout.buffer)
        else:
            names = keys.read_part(_cluster_dir(), sys.stdin.buffer)
            print(f"trainer: keys for node {', '.join(names)} are in {_cluster_dir()}")
    except NodeError as error:
        print(f"trainer: {error}", file=sys.stderr)
        return 1
    return 0


def serve() -> None:
    """Writes the settings of ssh and sshd, and becomes sshd. Returns never.

    Raises:
        NodeError: keys or settings cannot be made, or nothing tells which address to listen on.
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
        raise NodeError(f"cannot set up ssh in {home}: {error}") from None
    check = subprocess.run([SSHD, "-t", "-f", str(home / "sshd_config")], capture_output=True, text=True, check=False)
    if check.returncode != 0:
        raise NodeError(f"sshd does not take its settings: {check.stderr.strip()}")
    print(f"trainer: node {name} listens on port {port}", file=sys.stderr, flush=True)
    os.execv(SSHD, [SSHD, "-D", "-e", "-f", str(home / "sshd_config")])  # noqa: S606 (no shell is wanted)


def check_health() -> None:
    """Raises NodeError where sshd does not answer or `import horovod.torch` fails."""
    checked = _HEALTHY.stat().st_mtime if _HEALTHY.exists() else None
    if checked and time.time() - checked < _HEALTHY_FOR_S:
        return
    address, port = _served(Path.home() / ".ssh" / "sshd_config"), _port()
    try:
        with socket.create_connection((address, port), timeout=5) as connection:
            banner = connection.recv(64)
    except OSError as error:
        raise NodeError(f"sshd does not answer on {address} port {port}: {error}") from None
    if not banner.startswith(b"SSH-2.0-"):
        raise NodeError(f"what answers on {address} port {port} is not sshd: {banner!r}")
    if not checked:
        done = subprocess.run(["python", "-c", "import horovod.torch"], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NodeError(f"horovod.torch does not import: {done.stderr.strip()[-500:]}")
    _HEALTHY.touch()


def create_keys(names: list[str]) -> None:
    """Makes the keys of a cluster on several machines, and says how each gets its part."""
    folder = _cluster_dir()
    keys.create(folder, names, _port())
    print(f"trainer: keys for {', '.join(names)} are in {folder}. Hand every other machine its part:")
    for name in names:
        print(f"    … trainer-node keys export {name} | ssh MACHINE … trainer-node keys import")


def node_name() -> str:
    """This node's name, by which others log in to it."""
    return os.environ.get("TRAINER_NODE") or socket.gethostname()


def listen_address(folder: Path, name: str) -> str:
    """The address on the cluster's network.

    Raises:
        NodeError: no other node's name resolves, and the own one only to a loopback address or to none.
    """
    chosen = os.environ.get("TRAINER_LISTEN")
    if chosen:
        return chosen
    for other in [*(node for node in keys.pinned_names(folder) if node != name), name]:
        source = route_to(other)
        if source and not source.startswith("127."):
            return source
    raise NodeError(
        f"cannot tell which address belongs to the cluster's network: no node's name resolves to one, {name} included; "
        "set TRAINER_LISTEN to this host's address there"
    )


def route_to(host: str) -> str | None:
    """This host's own address on the way to `host`, as the kernel routes; None without a way or without such a host."""
    try:
        address = socket.gethostbyname(host)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing: it makes the kernel choose
            return str(probe.getsockname()[0])
    except OSError:
        return None


def ssh_environment() -> str:
    """The value of sshd's SetEnv: what every process that is started over ssh gets."""
    chosen = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_FOR_EVERY_LOGIN) and value.isprintable() and '"' not in value
    }
    return " ".join(f'"{name}={value}"' for name, value in chosen.items())


def _copy_keys(folder: Path, name: str, home: Path) -> None:
    """Into this node's own home, where modes and owner are right whatever they are in the folder."""
    for source, target in (
        (folder / keys.CLUSTER_KEY, "id_ed25519"),
        (folder / "nodes" / name / keys.HOST_KEY, "host_key"),
    ):
        try:
            mode = source.stat().st_mode
            keys.write_private(home / target, source.read_bytes())
        except OSError as error:
            raise NodeError(f"cannot read {source} as user {os.getuid()}: {error.strerror}") from None
        if mode & 0o077:
            print(f"trainer: WARNING: {source} had mode {mode & 0o777:o}; a private key's is 600", file=sys.stderr)
            try:
                source.chmod(0o600)
            except OSError as error:
                raise NodeError(
                    f"{source} can be read by others, and its mode cannot be mended: {error.strerror}"
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


def _served(settings: Path) -> str:
    try:
        lines = settings.read_text().splitlines()
    except OSError as error:
        raise NodeError(f"this node does not serve yet: {error}") from None
    return next(line.split()[1] for line in lines if line.startswith("ListenAddress "))


def _cluster_dir() -> Path:
    return Path(os.environ.get("TRAINER_CLUSTER_DIR") or "/cluster")


def _port() -> int:
    text = os.environ.get("TRAINER_SSH_PORT") or "2222"
    if not text.isdecimal() or not 1024 <= int(text) <= 65535:
        raise NodeError(f"TRAINER_SSH_PORT is {text!r}; valid are 1024 to 65535")
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

"""The link between the nodes a and b that `docker compose up` has started, as it is and made slow.

Both nodes' eth0 get tc's token buckets for a rate, and netem for a delay; not every kernel has netem. It needs root,
Docker and nsenter.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.errors import TrainerError

ROOT = Path(__file__).resolve().parent.parent
ON_A = ("docker", "compose", "exec", "-T", "a")
"""What stands in front of a command for node a."""
# Up to 20 ms of data may wait, as in a switch with a large buffer; more is dropped.
LINKS = {
    "unlimited": "",
    "1gbit": "tbf rate 1gbit burst 128kb latency 20ms",
    "100mbit": "tbf rate 100mbit burst 128kb latency 20ms",
    "20ms": "netem delay 20ms limit 100000",
}
"""tc's queueing discipline in each direction, by the name of the link; none for the link as it is."""


@contextmanager
def shaped(link: str) -> Iterator[None]:
    """Shape the link between the nodes, and restore it at the end."""
    nodes = ("a", "b") if LINKS[link] else ()
    try:
        for node in nodes:
            _in_network_of(node, "tc", "qdisc", "replace", "dev", "eth0", "root", *LINKS[link].split())
        yield
    finally:
        for node in nodes:
            with suppress(TrainerError):  # which fails where the rule was not set
                _in_network_of(node, "tc", "qdisc", "del", "dev", "eth0", "root")


def output(*command: str) -> str:
    """Run a command in the checkout's root; return what it prints."""
    try:
        return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise TrainerError(f"{' '.join(command)} failed: {error}") from None


def _in_network_of(node: str, *command: str) -> None:
    container = output("docker", "compose", "ps", "--format", "{{.Name}}", node).strip()
    if not container:
        raise TrainerError(f"node {node} does not run; start it with `docker compose up --build -d`")
    pid = output("docker", "inspect", "--format", "{{.State.Pid}}", container).strip()
    output("nsenter", "--target", pid, "--net", *command)

"""The link between the nodes a and b that `docker compose up` has started, as it is and made slow.

Rates are tc's token buckets on both nodes' eth0. Delays are made by delay_line.py, because not every kernel has netem.
Both need root, Docker and nsenter.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import ConfigError, TrainerError

ROOT = Path(__file__).resolve().parent.parent
NODES = ("a", "b")
ON_A = ("docker", "compose", "exec", "-T", "a")
"""What stands in front of a command for node a."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Properties of the link between the nodes."""

    rate: str | None = None
    """In tc's notation, in each direction."""
    delay_ms: float | None = None
    """In each direction."""


LINKS = {"unlimited": Link(), "1gbit": Link(rate="1gbit"), "100mbit": Link(rate="100mbit"), "20ms": Link(delay_ms=20)}


def check_links(names: Sequence[str]) -> None:
    """Raise `ConfigError` for the first name in --only that no link has."""
    if strange := [name for name in names if name not in LINKS]:
        raise ConfigError(f"--only has {strange[0]!r}; valid are {', '.join(LINKS)}")


@contextmanager
def shaped(link: Link) -> Iterator[Callable[[], None]]:
    """Shape the link between the nodes, and restore it at the end.

    Yields a function that raises `TrainerError` where the link has not stayed as it was made, after a measurement.
    """
    line: subprocess.Popen[str] | None = None

    def check() -> None:
        if line is not None and line.poll() is not None:
            raise TrainerError("delay_line.py ended before the measurement did, so the results are not valid")

    try:
        for node in NODES if link.rate else ():
            # Up to 20 ms of data may wait, as in a switch with a large buffer; more is dropped.
            rule = ["tbf", "rate", link.rate or "", "burst", "128kb", "latency", "20ms"]
            _in_network_of(node, "tc", "qdisc", "replace", "dev", "eth0", "root", *rule)
        if link.delay_ms:
            line = subprocess.Popen(
                [sys.executable, str(ROOT / "benchmarks/delay_line.py"), _pid("b"), str(link.delay_ms)],
                stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            if line.stdout is None or not line.stdout.readline():
                raise TrainerError("delay_line.py does not start")
        yield check
        check()
    finally:
        if line is not None:
            line.terminate()
            line.wait()
        for node in NODES if link.rate else ():
            with suppress(TrainerError):  # which fails where the rule was not set
                _in_network_of(node, "tc", "qdisc", "del", "dev", "eth0", "root")


def output(*command: str) -> str:
    """Run a command in the checkout's root; return what it prints."""
    try:
        return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise TrainerError(f"{' '.join(command)} failed: {error}") from None


def _in_network_of(node: str, *command: str) -> None:
    output("nsenter", "--target", _pid(node), "--net", *command)


def _pid(node: str) -> str:
    container = output("docker", "compose", "ps", "--format", "{{.Name}}", node).strip()
    if not container:
        raise TrainerError(f"node {node} does not run; start it with `docker compose up --build -d`")
    return output("docker", "inspect", "--format", "{{.State.Pid}}", container).strip()

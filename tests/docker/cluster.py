"""Nodes in real containers, started as the README says, for tests; afterwards none of them is left."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from examples.datasets.mnist import find_mnist

ROOT = Path(__file__).resolve().parent.parent.parent
# The compose files read this variable too.
IMAGE = os.environ.get("IMAGE", "trainer:cpu")
BUILD_TIMEOUT_S = 2400.0
# Every process of a job, on whatever node: what must be gone once the job is over.
JOB_PROCESSES = (
    "trainer run|torch.distributed.run|horovodrun|mpirun|orted|remote_exec|runs/|examples/|scripts/|"
    "parameter_server/server|python -c"
)


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    output: str
    """stdout and stderr together, in their order."""


def run(command: list[str], *, timeout_s: float = 120.0, env: Mapping[str, str] | None = None) -> Outcome:
    """Runs a command on this machine in the checkout's root, to its end or for `timeout_s`."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env=dict(os.environ, **(env or {})),
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )
    return Outcome(done.returncode, done.stdout)


def succeed(command: list[str], *, timeout_s: float = 120.0, env: Mapping[str, str] | None = None) -> str:
    """Runs a command that has to succeed, and returns its output."""
    outcome = run(command, timeout_s=timeout_s, env=env)
    assert outcome.code == 0, f"{' '.join(command)} ended with {outcome.code}:\n{outcome.output[-4000:]}"
    return outcome.output


def data_dir() -> Path | None:
    """The folder with the real MNIST that DATA_DIR names, if it does."""
    named = os.environ.get("DATA_DIR")
    folder = (ROOT / named).resolve() if named else None
    return folder if folder and find_mnist(folder) else None


class Cluster:
    """`docker compose` with a project of its own."""

    def __init__(self, project: str, *files: str) -> None:
        self.project = project
        self._command = ["docker", "compose", "--project-name", project]
        for file in files:
            self._command += ["--file", file]
        data = data_dir()
        self._env = {"DATA_DIR": str(data)} if data else {}

    def compose(self, *arguments: str, timeout_s: float = 120.0) -> str:
        """A compose command that has to succeed."""
        return succeed([*self._command, *arguments], timeout_s=timeout_s, env=self._env)

    def up(self, *services: str) -> None:
        self.compose("up", "--no-build", "--detach", "--wait", *services, timeout_s=180)

    def down(self) -> None:
        self.compose("down", "--volumes", "--timeout", "2", "--remove-orphans")

    def exec(self, node: str) -> list[str]:
        """How a user's script runs a command on a node; what follows is the command."""
        return [*self._command, "exec", "-T", node]

    def run(self, node: str, *command: str, timeout_s: float = 180.0) -> Outcome:
        """Runs a command on a node as its user would: `docker compose exec`."""
        return run([*self.exec(node), *command], timeout_s=timeout_s, env=self._env)

    def shell(self, node: str, script: str) -> str:
        """The output of a shell script on a node, whatever its exit code."""
        return self.run(node, "bash", "-c", script).output

    def container(self, node: str) -> str:
        """The name by which `docker` knows the node."""
        return self.compose("ps", "--all", "--format", "{{.Name}}", node).strip()

    @property
    def network(self) -> str:
        return f"{self.project}_default"

    def left_over(self, node: str, within_s: float = 20.0) -> str:
        """The processes of a job that are still on a node after a while; empty when all have gone."""
        deadline = time.monotonic() + within_s
        while True:
            found = self.shell(node, f"ps -eo pid,args | grep -E '{JOB_PROCESSES}' | grep -v grep")
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.5)

"""The two containers in which causes are made for `trainer doctor`, and how they are changed from outside."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.errors import TrainerError

ROOT = Path(__file__).resolve().parent.parent
_UP_TIMEOUT_S, _TIMEOUT_S = 240, 90


class Nodes:
    """Nodes a and b of a compose project.

    Args:
        files: compose files; docker-compose.yml when empty.
    """

    def __init__(self, project: str, files: Sequence[str]) -> None:
        self.project, self._files = project, list(files) or ["docker-compose.yml"]
        self._settings: Mapping[str, object] | None = None

    def up(self, settings: Mapping[str, object]) -> None:
        """Start the nodes, node b with these settings of compose, unless they run so."""
        if settings == self._settings:
            return
        # Causes are made in files of the nodes, which can be written here as in a container that nobody has hardened.
        common = "stop_grace_period: 1s, read_only: false, tmpfs: !reset []"
        node_b = "".join(f", {name}: {json.dumps(value)}" for name, value in settings.items())
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(f"services:\n  a: {{{common}}}\n  b: {{{common}{node_b}}}\n")
            file.flush()
            files = [*self._files, file.name]
            command = ["docker", "compose", "--project-directory", str(ROOT), "--project-name", self.project]
            command += [word for name in files for word in ("--file", name)]
            self._succeed([*command, "up", "--no-build", "--detach", "--wait"], _UP_TIMEOUT_S)
        self._settings = settings

    def down(self) -> None:
        """Remove nodes, network and volumes."""
        command = ["docker", "compose", "--project-name", self.project, "down", "--volumes", "--timeout", "1"]
        self._succeed(command, _UP_TIMEOUT_S)

    def container(self, node: str) -> str:
        """Return the name by which docker knows a node."""
        return f"{self.project}-{node}-1"

    def address(self, node: str) -> str:
        """Return a node's address on the cluster's network."""
        form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        return self._succeed(["docker", "inspect", "--format", form, self.container(node)]).strip()

    def process(self, node: str) -> str:
        """Return the id, on this machine, of a node's first process."""
        return self._succeed(["docker", "inspect", "--format", "{{.State.Pid}}", self.container(node)]).strip()

    def shell(self, node: str, script: str, user: str = "0") -> str:
        """Run a script on a node; return its output."""
        return self._succeed(["docker", "exec", "--user", user, self.container(node), "sh", "-ec", script])

    def inside(self, node: str, namespace: str, script: str) -> str:
        """Run a script of this machine's root in a namespace of a node ("net", "mount" or "uts")."""
        command = ["nsenter", "--target", self.process(node), f"--{namespace}", "sh", "-ec", script]
        return self._succeed(command)

    def here(self, *command: str) -> str:
        """Run a command on this machine."""
        return self._succeed(list(command))

    def doctor(self, node: str, *arguments: str, folder: str = "/trainer") -> subprocess.CompletedProcess[str]:
        """Run `trainer doctor` on a node."""
        command = ["docker", "exec", "--workdir", folder, self.container(node), "trainer", "doctor", *arguments]
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )

    def _succeed(self, command: list[str], timeout_s: float = _TIMEOUT_S) -> str:
        done = subprocess.run(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode:
            raise TrainerError(f"{' '.join(command)} failed: {(done.stderr or done.stdout).strip()[-800:]}")
        return done.stdout

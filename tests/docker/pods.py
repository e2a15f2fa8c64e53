"""Pods for tests: containers with the user, command, environment and volumes that a manifest gives them."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from tests.docker.cluster import Outcome, data_dir, run, succeed


class Pods:
    """A namespace: a network on which pods find one another by name, and the volumes that they share."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._containers: list[str] = []
        self._volumes: list[str] = []
        succeed(["docker", "network", "create", name])

    def end(self) -> None:
        """Remove all of it."""
        if self._containers:
            run(["docker", "rm", "--force", "--volumes", *self._containers])
        for volume in self._volumes:
            run(["docker", "volume", "rm", volume])
        run(["docker", "network", "rm", self._name])

    def volume(self, name: str) -> str:
        """A volume's name for docker."""
        full = f"{self._name}-{name}"
        if full not in self._volumes:
            self._volumes.append(full)
        return full

    def secret(self, name: str, image: str, script: str) -> None:
        """Fill a volume as root, as the files of a Secret are root's, and readable to all."""
        mount = f"{self.volume(name)}:/secret"
        command = ["docker", "run", "--rm", "--user", "0", "--volume", mount, "--workdir", "/secret"]
        succeed([*command, "--entrypoint", "sh", image, "-c", f"{script} && chmod 644 *"])

    def start(
        self, host: str, pod: Mapping[str, Any], container: Mapping[str, Any], env: Mapping[str, str],
        mounts: Sequence[str] = (),
    ) -> str:  # fmt: skip
        """Start a pod in the background; return the container's name.

        Args:
            host: the name by which other pods find it.
            mounts: volumes that an operator adds, as "volume:path".
        """
        user = pod["securityContext"]
        name = f"{self._name}-{host.partition('.')[0]}"
        command = [
            *["docker", "run", "--detach", "--name", name, "--hostname", host.partition(".")[0]],
            *["--network", self._name, "--network-alias", host, "--shm-size", "1g"],
            *["--user", f"{user['runAsUser']}:{user['runAsGroup']}", "--group-add", str(user["fsGroup"])],
            *["--cap-drop", *container["securityContext"]["capabilities"]["drop"]],
            *["--security-opt", "no-new-privileges"],
        ]
        kinds = {volume["name"]: volume for volume in pod["volumes"]}
        for mount in container["volumeMounts"]:
            claim = kinds[mount["name"]].get("persistentVolumeClaim", {}).get("claimName")
            if claim:
                command += ["--volume", f"{self.volume(claim)}:{mount['mountPath']}"]
        for mount in mounts:
            volume, _, path = mount.partition(":")
            command += ["--volume", f"{self.volume(volume)}:{path}:ro"]
        if data := data_dir():
            command += ["--volume", f"{data}:/trainer/data:ro"]
        for variable, value in env.items():
            command += ["--env", f"{variable}={value}"]
        # A container's `command` replaces the image's entry point, and $$ in it is $.
        entry, *words = [word.replace("$$", "$") for word in [*container["command"], *container["args"]]]
        self._containers.append(name)
        succeed([*command, "--entrypoint", entry, container["image"], *words])
        return name

    def logs(self, name: str) -> str:
        """What a pod has printed."""
        return run(["docker", "logs", name]).output

    def wait(self, name: str, timeout_s: float = 200.0) -> Outcome:
        """Wait for a pod's end."""
        try:
            code = int(succeed(["docker", "wait", name], timeout_s=timeout_s))
        except subprocess.TimeoutExpired:
            code = 124
        return Outcome(code, self.logs(name))

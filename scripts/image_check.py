"""Says of an image what somebody asks who has to let it in: `make image-check`, or

    python scripts/image_check.py trainer:cpu

What it consists of (from its SBOM), its digests, labels, size and user. It starts a node with the privileges that
docker-compose.yml gives it, and looks at what this listens on and may do. Only the standard library and `docker`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SBOM = "/usr/share/doc/trainer/sbom.json"
# As docker-compose.yml has it.
LIMITS = ("--cap-drop", "ALL", "--security-opt", "no-new-privileges:true")
_READY_WITHIN_S = 60
# Run in the node, by its own Python: what it listens on, and what its first process may do.
_LOOK = """
import json, pathlib, socket
from struct import pack
def address(text):
    host, port = text.split(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    raw = b"".join(pack("=I", word) for word in words)
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw), int(port, 16)
sockets = []
for kind, waiting in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
    for line in pathlib.Path("/proc/net", kind).read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == waiting:
            sockets.append([kind, *address(fields[1])])
status = dict(line.split(":", 1) for line in pathlib.Path("/proc/1/status").read_text().splitlines())
print(json.dumps({"sockets": sockets, "capabilities": int(status["CapEff"], 16), "bounded": int(status["CapBnd"], 16),
                  "no_new_privileges": status["NoNewPrivs"].strip() == "1"}))
"""


class CheckError(Exception):
    """Why an image cannot be looked at, in a line."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "image", nargs="?", default="trainer:cpu", help="as `docker run` takes it (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="the same facts for a program")
    options = parser.parse_args()
    try:
        facts = look(options.image)
    except CheckError as error:
        print(f"image-check: {error}", file=sys.stderr)
        return 1
    print(json.dumps(facts, indent=1) if options.json else table(facts))
    return 0


def docker(*arguments: str) -> str:
    """Run docker and return what it prints.

    Raises:
        CheckError: it fails.
    """
    try:
        done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise CheckError(f"docker is needed: {error.strerror}") from error
    if done.returncode != 0:
        lines = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()
        # Advice on options may stand below the reason.
        raise CheckError(next((line for line in lines if "error" in line.lower()), lines[-1]))
    return done.stdout


def look(image: str) -> dict[str, Any]:
    """Return the facts about an image, by the names that `table` prints.

    Raises:
        CheckError: there is no such image, or no node starts from it.
    """
    (inspected,) = json.loads(docker("image", "inspect", image))
    config = inspected["Config"]
    with started(image) as node:
        return {
            "image": image,
            "id": inspected["Id"],
            "digests": inspected["RepoDigests"] or ["none: it was not pulled from a registry, nor pushed"],
            "platform": f"{inspected['Os']}/{inspected['Architecture']}",
            "size": f"{inspected['Size'] / 1e9:.2f} GB in {len(inspected['RootFS']['Layers'])} layers",
            "user": docker("exec", node, "id").strip(),
            "command": " ".join([*(config["Entrypoint"] or []), *(config["Cmd"] or [])]),
            "exposed ports": sorted(config.get("ExposedPorts") or {}),
            "volumes": sorted(config.get("Volumes") or {}),
            **running(node),
            "setuid or setgid": privileged_files(image),
            "labels": [
                f"{name} = {value or '(not given)'}" for name, value in sorted((config["Labels"] or {}).items())
            ],
            "SBOM": counts(node),
        }


@contextmanager
def started(image: str) -> Iterator[str]:
    """Start a node and wait until it is healthy; it is gone afterwards.

    Raises:
        CheckError: it does not become healthy.
    """
    name = f"trainer-image-check-{uuid.uuid4().hex[:8]}"
    try:
        docker("run", "--detach", "--name", name, *LIMITS, image)
        check = (
            f"for _ in $(seq {_READY_WITHIN_S}); do trainer-node health >/dev/null 2>&1 && exit; sleep 1; done; exit 1"
        )
        try:
            docker("exec", name, "sh", "-c", check)
        except CheckError as error:
            raise CheckError(f"no node of {image} is healthy within {_READY_WITHIN_S} s ({error})") from error
        yield name
    finally:
        subprocess.run(["docker", "rm", "--force", "--volumes", name], capture_output=True, check=False)


def running(node: str) -> dict[str, Any]:
    """Return what a started node listens on and may do."""
    seen = json.loads(docker("exec", node, "python", "-c", _LOOK))
    privileges = "cannot be gained" if seen["no_new_privileges"] else "can be gained from setuid files"
    return {
        "listens on": [f"{kind} {host} port {port}" for kind, host, port in seen["sockets"]] or ["nothing"],
        "capabilities": f"effective {seen['capabilities']:#x}, bounding set {seen['bounded']:#x}; more {privileges}",
    }


def privileged_files(image: str) -> list[str]:
    """Return the files that run as their owner or group, as root sees them."""
    find = ("find", "/", "-xdev", "-type", "f", "-perm", "/6000", "-printf", "%M %u:%g %p\\n")
    return docker("run", "--rm", "--user", "0", "--entrypoint", find[0], image, *find[1:]).splitlines() or ["none"]


def counts(node: str) -> list[str]:
    """Return how many parts the SBOM has of each kind, and of what Horovod was made."""
    try:
        sbom = json.loads(docker("exec", node, "cat", SBOM))
    except CheckError:
        return [f"none: there is no {SBOM}"]
    purls = [component.get("purl", "") for component in sbom["components"]]
    binary = [purl for purl in purls if purl.startswith("pkg:deb/") and "arch=source" not in purl]
    python = [component for component in sbom["components"] if is_python(component)]
    horovod = next(component for component in python if component["name"] == "horovod")
    return [
        f"{SBOM}, {sbom['bomFormat']} {sbom['specVersion']}",
        f"{len(python)} Python packages",
        f"{len(binary)} Debian packages, made from {sum('arch=source' in purl for purl in purls)} sources",
        f"Horovod {horovod['version']} with {len(horovod['pedigree']['patches'])} patches, "
        f"{len([part for part in horovod['components'] if part['type'] == 'library'])} libraries within it",
    ]


def is_python(component: dict[str, Any]) -> bool:
    """Return whether a part of an SBOM is a Python package; ours has no address in an index."""
    return component["type"] == "library" and not component.get("purl", "").startswith("pkg:deb/")


def table(facts: dict[str, Any]) -> str:
    """Return the facts as text: a name, and a line for each value."""
    lines = []
    for name, value in facts.items():
        values = value if isinstance(value, list) else [value]
        lines += [f"{name if not at else '':<18}{text}" for at, text in enumerate(values)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

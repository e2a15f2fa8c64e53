"""Writes into the Dockerfiles what the tags of their bases name today: `make bases`.

    python scripts/install/bases.py

A base stands there as two arguments, its tag and the digest of the index that the tag named:

    ARG DEBIAN=debian:bookworm-slim
    ARG DEBIAN_DIGEST=sha256:...

The registry is asked through `docker buildx imagetools`, with the engine's own settings for registries and proxies.
Only the standard library: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from console import SetupError, say

HERE = Path(__file__).resolve().parent
FILE = HERE.parents[1] / "Dockerfile"
PINNED = re.compile(
    r"^(?P<mark>(?:# gpu\+ )?)ARG (?P<name>\w+)=(?P<tag>\S+:\S+)\n"
    r"(?P=mark)ARG (?P=name)_DIGEST=(?P<digest>sha256:\w{64})$",
    re.MULTILINE,
)
"""A base of Dockerfile, or of Dockerfile.gpu alone, which is made of it."""


def main() -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    ).parse_args()
    try:
        FILE.write_text(moved(FILE.read_text()))
    except SetupError as error:
        say(str(error))
        return 1
    return subprocess.run([sys.executable, str(HERE / "gpu_dockerfile.py")], check=False).returncode


def moved(text: str) -> str:
    """Return a Dockerfile's text with the digests of today, and say of each base whether it has moved.

    Raises:
        SetupError: a registry does not answer, or what it has under a tag is not for several platforms.
    """

    def move(base: re.Match[str]) -> str:
        digest, platforms = look_up(base["tag"])
        change = "has not moved" if digest == base["digest"] else f"{base['digest'][:19]} -> {digest[:19]}"
        say(f"{base['tag']}: {change} ({', '.join(platforms)})")
        return base[0].replace(base["digest"], digest)

    return PINNED.sub(move, text)


def pinned(text: str) -> list[str]:
    """Return the bases in a Dockerfile's text, as `docker pull` takes them."""
    return [f"{base['tag']}@{base['digest']}" for base in PINNED.finditer(text)]


def look_up(tag: str) -> tuple[str, list[str]]:
    """Return the digest of the index that a tag names, and the platforms that it has.

    Raises:
        SetupError: the registry does not answer, or what it has is one image, which serves one platform only.
    """
    command = ["docker", "buildx", "imagetools", "inspect", tag, "--format", "{{json .Manifest}}"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise SetupError(f"docker is needed to ask a registry: {error.strerror}") from error
    if asked.returncode != 0:
        reason = (asked.stderr.strip() or f"exit code {asked.returncode}").splitlines()[-1]
        raise SetupError(f"the registry does not say what {tag} is: {reason}")
    index: dict[str, Any] = json.loads(asked.stdout)
    named = [entry.get("platform", {}) for entry in index.get("manifests", [])]
    # Attestations are entries of an unknown system.
    systems = [platform for platform in named if platform.get("os", "unknown") != "unknown"]
    platforms = sorted({f"{platform['os']}/{platform['architecture']}" for platform in systems})
    if not platforms:
        raise SetupError(f"{tag} is one image ({index['mediaType']}), not an index of images for several platforms")
    return index["digest"], platforms


if __name__ == "__main__":
    sys.exit(main())

"""The image's SBOM names what is in it, its labels say where it comes from, and `make image-check` says both."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import horovod_wheel
import pytest

from tests.docker.cluster import IMAGE, run, succeed

Component = dict[str, Any]


def inside(*command: str) -> str:
    """Return what a command prints in a container of the image."""
    return succeed(["docker", "run", "--rm", "--entrypoint", command[0], IMAGE, *command[1:]])


@pytest.fixture(scope="module")
def components(image: str) -> list[Component]:
    """The parts that the image's SBOM names."""
    sbom = json.loads(inside("cat", "/usr/share/doc/trainer/sbom.json"))
    assert sbom["metadata"]["component"]["name"] == "trainer"
    parts: list[Component] = sbom["components"]
    return parts


def test_the_sbom_names_every_python_package(components: list[Component]) -> None:
    listed = json.loads(inside("pip", "list", "--format", "json"))
    named = {
        (part["name"], part["version"])
        for part in components
        if part["type"] == "library" and "pkg:deb/" not in str(part.get("purl"))
    }
    assert named == {(package["name"], package["version"]) for package in listed}


def test_image_check_says_what_a_stranger_asks(image: str) -> None:
    facts = json.loads(succeed([sys.executable, "scripts/image_check.py", image, "--json"]))
    assert facts["user"].startswith("uid=1000(trainer)")
    (sshd,) = facts["listens on"]
    assert re.fullmatch(r"tcp [\d.]+ port 2222", sshd)
    assert facts["capabilities"].startswith("effective 0x0, bounding set 0x0; more cannot be gained")
    patches = len(horovod_wheel.patches())
    assert any(f"with {patches} patches" in line for line in facts["SBOM"])
    assert "-rwsr-xr-x root:root /usr/bin/su" in facts["setuid or setgid"]
    missing = run([sys.executable, "scripts/image_check.py", "trainer:none"])
    assert (missing.code, missing.output.count("\n")) == (1, 1)
    assert missing.output.startswith("image-check: Error")
    assert "trainer:none" in missing.output

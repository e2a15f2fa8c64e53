"""Writes what an image consists of as a CycloneDX document: Python's packages, Debian's, and what was compiled.

    python scripts/install/sbom.py --python /opt/venv/bin/python --out /usr/share/doc/trainer/sbom.json

cyclonedx-bom reads the environment, debsbom reads dpkg's list, and both have to be installed for the Python that runs
this. To Horovod, which is built here, it adds what that was built from: the source's hash, every file that changes it,
the libraries that are within it, and the compiler. As all of this takes seconds, an image has it written before our own
code is there; what is said of that is what pyproject.toml says.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import horovod_sdist
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

PROJECT = horovod_sdist.ROOT / "pyproject.toml"
SPEC = SchemaVersion.V1_6
# How GCC and nvcc name themselves in what they compile.
COMPILERS = re.compile(rb"GCC: \([^)]*\) [\d.]+|Cuda compilation tools, release [\d.]+, V[\d.]+")
# What Horovod's source has in its own third_party/ and compiles: the versions stand in these libraries' headers.
BUNDLED = {"boost": "1.69", "eigen": "3.4.0", "flatbuffers": "2.0.0", "gloo": "0.5.0", "HTTPRequest": "", "lbfgs": ""}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--python", type=Path, required=True, help="Python of the environment")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor() as pool:
        debian_later = pool.submit(debian_packages, Path(name))
        python, debian = python_packages(options.python, Path(name)), debian_later.result()
    libraries = list(options.python.parents[1].glob("lib/python3*/site-packages/horovod/torch/mpi_lib_v2*.so"))
    horovod = next(component for component in python["components"] if component["name"] == "horovod")
    horovod |= compiled(libraries)
    python["components"].append(project(tomllib.loads(PROJECT.read_text())["project"]))
    text = json.dumps(merged(python, debian), indent=1) + "\n"
    if problem := JsonStrictValidator(SPEC).validate_str(text):
        print(f"{options.out} would not be a valid CycloneDX document: {problem}", file=sys.stderr)
        return 1
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text)
    return 0


def python_packages(python: Path, folder: Path) -> dict[str, Any]:
    """Return what is installed in an environment, as CycloneDX."""
    out = folder / "python.json"
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--spec-version", SPEC.to_version()]
    subprocess.run([*command, "--output-reproducible", "--output-file", str(out), str(python)], check=True)
    document: dict[str, Any] = json.loads(out.read_text())
    return document


def debian_packages(folder: Path) -> dict[str, Any]:
    """Return what dpkg has installed, with the source packages, as CycloneDX."""
    command = [str(Path(sys.executable).with_name("debsbom")), "generate", "--sbom-type", "cdx", "--with-licenses"]
    command += ["--cdx-schema-version", SPEC.to_version(), "--out", str(folder / "debian")]
    # It says of every package whose maintainer is a team that it knows no supplier.
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    document: dict[str, Any] = json.loads((folder / "debian.cdx.json").read_text())
    return document


def project(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return our own component, from what pyproject.toml says of it."""
    name, version = metadata["name"], metadata["version"]
    licenses = [{"license": {"id": metadata["license"], "acknowledgement": "declared"}}]
    return {"type": "library", "bom-ref": f"{name}=={version}", "name": name, "version": version, "licenses": licenses}


def compiled(libraries: list[Path]) -> dict[str, Any]:
    """Return what Horovod's component has besides its name and version, of the libraries that were compiled."""
    pin = horovod_sdist.PIN.read_text()
    version = re.findall(r"^horovod==([\w.]+)", pin, re.MULTILINE)[0]
    ancestor = {
        "type": "library",
        "name": "horovod",
        "version": version,
        "purl": f"pkg:pypi/horovod@{version}",
        "hashes": [{"alg": "SHA-256", "content": digest} for digest in re.findall(r"--hash=sha256:(\w+)", pin)],
    }
    compilers = {text.decode() for path in libraries for text in COMPILERS.findall(path.read_bytes())}
    hashes = [
        (f"trainer:change:{path.relative_to(horovod_sdist.CHANGES)}", f"sha256:{sha256(path)}")
        for path in horovod_sdist.changes()
    ]
    built_with = [("trainer:compiler", compiler) for compiler in sorted(compilers)]
    return {
        "purl": f"pkg:pypi/horovod@{version}",
        "pedigree": {
            "ancestors": [ancestor],
            "patches": [
                {"type": "unofficial", "diff": {"url": str(path.relative_to(horovod_sdist.ROOT))}}
                for path in horovod_sdist.patches()
            ],
            "notes": "Compiled from the ancestor's source, with these patches and the changes among the properties.",
        },
        "properties": [{"name": name, "value": value} for name, value in built_with + hashes],
        "components": [library(path) for path in libraries]
        + [bundled(name, version) for name, version in sorted(BUNDLED.items())],
    }


def library(path: Path) -> dict[str, Any]:
    """Return the component of a file that was compiled."""
    return {"type": "file", "name": path.name, "hashes": [{"alg": "SHA-256", "content": sha256(path)}]}


def bundled(name: str, version: str) -> dict[str, Any]:
    """Return the component of a library whose source comes with Horovod's."""
    known = {"version": version, "purl": f"pkg:generic/{name}@{version}"} if version else {}
    return {"type": "library", "bom-ref": f"horovod/third_party/{name}", "name": name} | known


def sha256(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def merged(python: dict[str, Any], debian: dict[str, Any]) -> dict[str, Any]:
    """Return one document of both, whose subject is the image. The last of Python's components is ours."""
    version = python["components"][-1]["version"]
    image = {"type": "container", "bom-ref": "trainer", "name": "trainer", "version": version}
    system = debian["metadata"]["component"]
    parts = [system["bom-ref"], *(component["bom-ref"] for component in python["components"])]
    tools = [tool for document in (python, debian) for tool in document["metadata"]["tools"]["components"]]
    return {
        "$schema": python["$schema"],
        "bomFormat": "CycloneDX",
        "specVersion": SPEC.to_version(),
        "version": 1,
        "metadata": {"component": image, "tools": {"components": tools}},
        "components": [*python["components"], *debian["components"], system],
        "dependencies": [
            {"ref": image["bom-ref"], "dependsOn": parts},
            *python["dependencies"],
            *debian["dependencies"],
        ],
    }


if __name__ == "__main__":
    sys.exit(main())

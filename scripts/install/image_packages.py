"""Installs the locked packages for an image: PyTorch from an index of its CPU builds if there is one, else from PyPI.

    python scripts/install/image_packages.py --torch-index https://download.pytorch.org/whl/cpu
    python scripts/install/image_packages.py --torch-index ""    # PyPI: PyTorch with CUDA and NCCL

PyTorch's wheels on PyPI bring CUDA with them, 5 GB that a CPU image has no use for. Its own index has builds
without. They have the same version and other hashes, which the lock does not know: torch and torchvision are
protected by HTTPS alone then, everything else by the lock's hashes. Where the index does not answer, or does not
have the locked version, PyPI's builds are taken, with their hashes, and a line says so; of CUDA, only the libraries
that they link are kept then, 2 GB less. Run it with the Python to install the packages for. Only the standard library:
nothing is installed yet when it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import urllib.parse
import urllib.request
from pathlib import Path

import packages
from console import SetupError, say

LOCK = packages.REQUIREMENTS / "run.txt"
FROM_TORCH_INDEX = ("torch", "torchvision")
# What only PyTorch's CUDA builds ask for.
_CUDA_PACKAGE = re.compile(r"^(nvidia-|cuda-|triton$)")
# Of these, PyTorch without a GPU needs only the libraries that it links: not Triton, which it imports where it is.
_FOR_GPUS = re.compile(r"(nvidia_|triton-)")
_ANSWER_WITHIN_S = 20.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--torch-index", default="", metavar="URL", help="index of PyTorch's builds; empty for PyPI")
    index = wanted = parser.parse_args().torch_index.rstrip("/")
    requirements = split_lock(LOCK.read_text())
    pins = [requirements[name].split()[0] for name in FROM_TORCH_INDEX]
    if index and (problem := missing_from(index, pins)):
        say(f"WARNING: {problem}; taking PyTorch from PyPI, with CUDA (about 2.6 GB more)")
        index = ""
    locked = [text for name, text in requirements.items() if not index or not _from_index(name)]
    try:
        with tempfile.TemporaryDirectory(prefix="trainer-") as name:
            _install(Path(name), index, pins, locked)
        if index != wanted:
            freed = remove_all_but(loaded_by_torch(), Path(sysconfig.get_path("purelib")))
            say(f"removed {freed / 1e9:.1f} GB of CUDA that PyTorch does not link")
    except SetupError as error:
        say(str(error))
        return 1
    return 0


def split_lock(text: str) -> dict[str, str]:
    """A lock's requirements by name, each with its hashes, without comments.

    A package that is locked twice for different Pythons is one entry, because pip reads markers itself.
    """
    requirements: dict[str, str] = {}
    body = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for entry in re.split(r"\n(?=\S)", body.strip()):
        name = re.split(r"[=<>!~\[; ]", entry, maxsplit=1)[0].lower()
        requirements[name] = "\n".join(filter(None, (requirements.get(name), entry)))
    return requirements


def missing_from(index: str, pins: list[str]) -> str | None:
    """Why these requirements cannot be had from a simple index, in a few words; None when they can."""
    for pin in pins:
        name, version = pin.split("==")
        try:
            # An index given by the person who builds, as pip would open it.
            with urllib.request.urlopen(f"{index}/{name}/", timeout=_ANSWER_WITHIN_S) as page:  # noqa: S310
                files = urllib.parse.unquote(page.read().decode(errors="replace"))
        except (OSError, ValueError) as error:
            return f"{index} does not answer ({getattr(error, 'reason', error)})"
        if not re.search(rf"{name}-{re.escape(version)}(\+[\w.]+)?-", files):
            return f"{index} has no {name} {version}"
    return None


def loaded_by_torch() -> set[Path]:
    """The files that are in memory when PyTorch has been imported.

    Raises:
        SetupError: it cannot be imported.
    """
    program = "import torch; print(open('/proc/self/maps').read())"
    imported = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if imported.returncode:
        raise SetupError(f"PyTorch cannot be imported:\n{imported.stderr}")
    return {Path(line.split(maxsplit=5)[5]) for line in imported.stdout.splitlines() if "/" in line}


def remove_all_but(kept: set[Path], site: Path) -> int:
    """Remove the files of CUDA's packages that are not in `kept`, also from pip's records in `site`.

    Returns their bytes.

    The packages stay installed for pip, or it would fetch them again with the next package that asks for PyTorch.
    """
    freed = 0
    for record in site.glob("*.dist-info/RECORD"):
        if not _FOR_GPUS.match(record.parent.name):
            continue
        with record.open(newline="") as file:
            rows = list(csv.reader(file))
        linked = {row[0] for row in rows if row[0].startswith("nvidia/") and (site / row[0]).resolve() in kept}
        gone = [row for row in rows if row[0] not in linked and not row[0].startswith(record.parent.name)]
        freed += sum(_remove(site / name) for name, *_ in gone)
        with record.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(row for row in rows if row not in gone)
    return freed


def _remove(path: Path) -> int:
    """Remove a file, its bytecode and the folders that are empty then; returns the file's bytes.

    A folder that stayed could be imported as a namespace package.
    """
    size = path.stat().st_size
    for file in (path, Path(importlib.util.cache_from_source(str(path)))):
        file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty, or not there
            os.removedirs(file.parent)
    return size


def _from_index(name: str) -> bool:
    return name in FROM_TORCH_INDEX or _CUDA_PACKAGE.match(name) is not None


def _install(folder: Path, index: str, pins: list[str], locked: list[str]) -> None:
    """Installs everything, `pins` from `index` if there is one, through a uv that is gone afterwards."""
    uv = packages.get_uv(sys.executable, folder / "uv.log", folder / "uv")
    # Ranks cannot write into the image, so their bytecode is compiled here.
    options = ["--no-deps", "--compile-bytecode"]
    if index:
        source = ["--index-url", index, *pins]
        packages.install("installing PyTorch", sys.executable, uv, [*options, *source], folder / "torch.log")
    lock = folder / "lock.txt"
    lock.write_text("\n".join(locked) + "\n")
    source = ["--require-hashes", "--requirement", str(lock)]
    packages.install("installing the locked packages", sys.executable, uv, [*options, *source], folder / "lock.log")


if __name__ == "__main__":
    sys.exit(main())

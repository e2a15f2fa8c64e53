"""Makes .venv-peers: the libraries that `make bench` compares with, trackers, and beside them .venv's own packages.

    .venv/bin/python scripts/install/peers.py    # takes no options

So all contestants have one PyTorch, and .venv stays without what the project does not need. The trackers are those of
docs/trackers.md. When nothing has changed since the last time, it returns at once.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import packages
from console import SetupError, run, say

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv-peers"
STAMP = VENV / "trainer-peers.sha256"
LOCK = packages.REQUIREMENTS / "peers.txt"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.parse_args()
    packages_of_venv = sysconfig.get_path("purelib")
    wanted = hashlib.sha256(packages_of_venv.encode() + LOCK.read_bytes()).hexdigest()
    python = VENV / "bin" / "python"
    if python.exists() and STAMP.exists() and STAMP.read_text() == wanted:
        return 0
    command = [str(python), "-m", "pip", "install", "--quiet", "--require-hashes", "--requirement", str(LOCK)]
    try:
        venv.create(VENV, clear=True, with_pip=True)
        _show_packages_of(packages_of_venv, python)
        log = VENV / "logs" / "peers.log"
        run("installing the libraries that we compare with", command, log, env=packages.lock_alone())
    except (SetupError, OSError, subprocess.CalledProcessError) as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next call begins anew")
        return 130
    STAMP.write_text(wanted)
    return 0


def _show_packages_of(folder: str, python: Path) -> None:
    """Let an environment import another's packages, editable ones as well, and pip see that they are installed."""
    find = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(find, capture_output=True, text=True, check=True).stdout.strip()
    Path(packages, "venv-beside.pth").write_text(f"import site; site.addsitedir({folder!r})\n")


if __name__ == "__main__":
    sys.exit(main())

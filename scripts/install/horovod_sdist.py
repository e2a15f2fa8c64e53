"""Makes a source distribution of Horovod's pinned source and our changes, which pip builds like any other.

python scripts/install/horovod_sdist.py --dir dist    # prints its path
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from console import SetupError, run, say

ROOT = Path(__file__).resolve().parents[2]
PIN = ROOT / "requirements" / "horovod.txt"
CHANGES = ROOT / "third_party" / "horovod"
"""What we change in Horovod; its README says how."""
PURPOSES = ("build", "runtime", "launcher")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--dir", type=Path, required=True, help="where it goes")
    add_upstream(parser)
    options = parser.parse_args()
    try:
        options.dir.mkdir(parents=True, exist_ok=True)
        print(make_sdist(options.dir, options.upstream))
    except SetupError as error:
        say(str(error))
        return 1
    return 0


def add_upstream(parser: argparse.ArgumentParser) -> None:
    """Add the option that names a file to take in place of a download."""
    parser.add_argument(
        "--upstream",
        type=Path,
        metavar="FILE",
        help="horovod-0.28.1.tar.gz, for a machine that cannot download it; its hash is checked",
    )


def make_sdist(folder: Path, upstream: Path | None = None) -> Path:
    """Leave the source distribution in `folder`, whole or not at all, and return its path.

    Args:
        folder: exists already.
        upstream: Horovod's own source distribution; downloaded through pip when None.

    Raises:
        SetupError: the source is not the pinned one, or a patch does not apply.
    """
    with tempfile.TemporaryDirectory(prefix="horovod-sdist-") as name:
        work = Path(name)
        shutil.unpack_archive(_verified(upstream) if upstream else _download(work), work)
        source = next(path for path in work.glob("horovod-*") if path.is_dir())
        change(source)
        version = local_version()
        (source / "version.txt").write_text(version + "\n")
        (source / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: horovod\nVersion: {version}\n")
        built = work / f"horovod-{version}.tar.gz"
        with tarfile.open(built, "w:gz") as archive:
            archive.add(source, f"horovod-{version}")
        # A rename is atomic: an interrupted copy is never taken for the whole.
        partial = shutil.copy2(built, folder / f"{built.name}.partial")
        return Path(partial).rename(folder / built.name)


def local_version() -> str:
    """Horovod's version, with a hash of our changes: another change is another version."""
    pinned = re.search(r"^horovod==([\d.]+)", PIN.read_text(), re.MULTILINE)
    if pinned is None:
        raise SetupError(f"{PIN} pins no version of Horovod")
    digest = hashlib.sha256()
    for file in (PIN, *changes()):
        digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return f"{pinned[1]}+trainer.{digest.hexdigest()[:8]}"


def _download(work: Path) -> Path:
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-binary", "horovod", "--require-hashes"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(work), "--requirement", str(PIN)]
    run("downloading Horovod's source", command, work / "download.log")
    return next(work.glob("horovod-*.tar.gz"))


def _verified(upstream: Path) -> Path:
    wanted = re.findall(r"--hash=sha256:(\w+)", PIN.read_text())
    if not upstream.is_file():
        raise SetupError(f"--upstream {upstream}: there is no such file")
    digest = hashlib.sha256(upstream.read_bytes()).hexdigest()
    if digest not in wanted:
        raise SetupError(f"--upstream {upstream}: its SHA-256 is {digest}, but {PIN.name} pins {', '.join(wanted)}")
    return upstream


def changes() -> list[Path]:
    """Return every file that it is made from, besides Horovod's source, in a fixed order."""
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


if __name__ == "__main__":
    sys.exit(main())

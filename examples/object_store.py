"""Runs a training whose checkpoints are also kept in an object store: S3, Google Cloud Storage, whatever fsspec opens.

python examples/object_store.py s3://bucket/run runs/saved -- trainer run -np 2 python train.py --checkpoint runs/saved

The command saves into the folder on the local disk, as it would alone. The newest committed checkpoint, and the best,
are uploaded beside the training, the manifest last: in the store, too, a checkpoint is whole or not there. Before the
command starts, they are fetched, unless the folder has newer ones.

It needs fsspec and the store's package, such as s3fs. Of several hosts, start it on the one that rank 0 is on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec

MANIFEST = "manifest.json"


def order(name: str) -> list[int]:
    """Return the numbers in a checkpoint's name, of which the larger are the newer; none of another name."""
    match = re.fullmatch(r"attempt-(\d+)-epoch-(\d+)-update-(\d+)", name)
    return [int(number) for number in match.groups()] if match else []


def newest_first(names: Iterable[str]) -> list[str]:
    return sorted(filter(order, names), key=order, reverse=True)


class Mirror:
    """A folder of checkpoints, and its copy in a store."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url.rstrip("/"), folder
        self.store, self.root = fsspec.url_to_fs(self.url)
        self.uploaded = ""
        self.is_failing = False

    def local(self) -> list[str]:
        return newest_first(path.name for path in self.folder.glob("attempt-*"))

    def stored(self) -> list[str]:
        """Return the store's checkpoints. One without a manifest was not uploaded as a whole, and is none."""
        self.store.invalidate_cache()
        return [name for name in newest_first(self._list()) if MANIFEST in self._list(f"/{name}")]

    def _list(self, folder: str = "") -> list[str]:
        # fsspec's own `glob` takes a store that refuses to answer for an empty one.
        with suppress(FileNotFoundError):
            return [Path(path).name for path in self.store.ls(f"{self.root}{folder}", detail=False)]
        return []

    def manifest(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / name / MANIFEST).read_text())
        return content

    def fetch(self) -> None:
        """Fetch the newest checkpoint that is as it was written, and the best, unless the folder has newer ones."""
        here, stored = self.local(), self.stored()
        for name in stored:
            if here and order(name) <= order(here[0]):
                return
            if self._fetched(name):
                best = self.best(name)
                if best in stored and best not in self.local():
                    self._fetched(best)
                return

    def _fetched(self, name: str) -> bool:
        try:
            self._download(name)
        except ValueError as error:
            print(f"object_store: WARNING: {self.url}/{name}: {error}; it is skipped", file=sys.stderr)
            return False
        print(f"object_store: {name} is fetched from {self.url}", file=sys.stderr)
        return True

    def best(self, name: str) -> str:
        """Return the name of the best checkpoint when this one was written; its own where no score is given."""
        best = self.manifest(name)["facts"]["best"]
        return best[1] if best else name

    def _download(self, name: str) -> None:
        part = self.folder / f".{name}.partial"  # the library removes what an interruption leaves of it
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        self.store.get_file(f"{self.root}/{name}/{MANIFEST}", str(part / MANIFEST))
        for file, entry in json.loads((part / MANIFEST).read_text())["files"].items():
            if Path(file).name != file:
                raise ValueError(f"{file!r} is no plain file name")
            self.store.get_file(f"{self.root}/{name}/{file}", str(part / file))
            with (part / file).open("rb") as content:
                if hashlib.file_digest(content, "sha256").hexdigest() != entry["sha256"]:
                    raise ValueError(f"{file} is damaged")
        part.rename(self.folder / name)

    def upload(self) -> None:
        """Upload the newest checkpoint, and the best; then remove older ones that the folder no longer has."""
        here = self.local()
        if not here or here[0] == self.uploaded:
            return
        for name in {here[0], self.best(here[0])} - set(self.stored()):
            try:
                for file in [*self.manifest(name)["files"], MANIFEST]:
                    self.store.put_file(str(self.folder / name / file), f"{self.root}/{name}/{file}")
            except FileNotFoundError:
                if (self.folder / name).exists():
                    raise  # else the training has replaced it by a newer one, which is next
        self.uploaded = here[0]
        for name in newest_first(self._list()):
            if name not in here and order(name) < order(here[0]):
                with suppress(FileNotFoundError):
                    self.store.rm_file(f"{self.root}/{name}/{MANIFEST}")  # first: what is left is no checkpoint
                self.store.rm(f"{self.root}/{name}", recursive=True)

    def try_upload(self) -> bool:
        """Upload; return whether the newest checkpoint is in the store. Of failures in a row, tell the first."""
        try:
            self.upload()
        except Exception as error:
            if not self.is_failing:
                print(f"object_store: WARNING: {self.url}: {told(error)}; tried again later", file=sys.stderr)
            self.is_failing = True
            return False
        self.is_failing = False
        return True


def told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [--every-s S] URL FOLDER -- COMMAND …",
    )
    parser.add_argument("url", help="of this training alone, as s3://bucket/run")
    parser.add_argument("folder", type=Path, help="of the checkpoints, on this host's disk")
    parser.add_argument("--every-s", type=float, default=5.0, help="seconds between two looks (default: %(default)s)")
    # argparse would also take a later --, which is the command's.
    here = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, command = parser.parse_args(sys.argv[1:here]), sys.argv[here + 1 :]
    if not command or shutil.which(command[0]) is None:
        parser.error(f"behind -- comes the training's command, a program on the PATH; it is {' '.join(command)!r}")
    try:
        mirror = Mirror(args.url, args.folder)
        mirror.fetch()
    except Exception as error:
        print(f"object_store: {args.url} cannot be read, and nothing is started: {told(error)}", file=sys.stderr)
        return 1
    process = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, _: process.send_signal(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the command as well
    is_running = True
    while is_running:
        with suppress(subprocess.TimeoutExpired):
            process.wait(args.every_s)
        is_running = process.returncode is None
        is_uploaded = mirror.try_upload()
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    if not is_uploaded:
        print(f"object_store: {mirror.local()[0]} is in {args.folder} only, not in {args.url}", file=sys.stderr)
        code = code or 1
    return code


if __name__ == "__main__":
    sys.exit(main())

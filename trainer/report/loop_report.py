"""Progress and record of a training loop that the user writes, on rank 0."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from trainer.cluster.world import World
from trainer.data.base import Loader
from trainer.errors import ConfigError
from trainer.report.display import Display
from trainer.report.run_record import RunFolder, describe_optimizer, describe_run

Settings = Mapping[str, Any] | Namespace
"""A script's settings, as a mapping or as argparse returns them."""

LogFunction = Callable[[dict[str, float], int], object]
"""A function that takes values by name, and their step."""

_LINE_EVERY_S = 10.0


class LoopReport:
    """Progress and record of a `Run`.

    Args:
        world: rank 0 of it shows and writes.
        settings: of the run, for settings.json.
    """

    def __init__(self, world: World, settings: Mapping[str, Any]) -> None:
        self._world, self._settings = world, settings
        self.optimizers: WeakKeyDictionary[Optimizer, None] = WeakKeyDictionary()
        """The prepared optimizers that are still held, for settings.json."""
        self.epochs = range(0)
        """The epochs that the loop is about to run."""
        self._folder: RunFolder | None = None
        self.has_named_folder = False
        """Whether the script has named the record's folder, so that a later start would have to go on in it."""
        self.functions: list[LogFunction] = []
        """See `Run.log_to`."""
        self._display: Display | None = None
        self._shown: list[str] = []

    def open(
        self, folder: str | Path, settings: Settings | None, broadcast_object: Callable[[Any], Any], checkpoints: str
    ) -> Path:
        """See `Run.record`."""
        self.has_named_folder = folder != "auto"
        script = vars(settings) if isinstance(settings, Namespace) else settings or {}
        facts = {
            "settings": dict(script),
            **self._settings,
            "optimizers": [describe_optimizer(optimizer) for optimizer in self.optimizers],
            **describe_run(self._world),
            "checkpoints": checkpoints,
        }
        self._folder = RunFolder(self._world, broadcast_object, folder, facts)
        return self._folder.path

    def log(self, values: Mapping[str, Tensor | float], step: int) -> None:
        """See `Run.log`.

        Raises:
            ConfigError: a name is taken, a value is not a number, or, on rank 0, there is no folder, no progress and
                no function.
        """
        for name in ("step", "seconds"):
            if name in values:
                raise ConfigError(f"run.log writes {name!r} itself; call the value something else")
        if not self._world.is_root:
            return
        if self._folder is None and self._display is None and not self.functions:
            raise ConfigError(
                "run.log has nowhere to write: call run.record() for a folder, run.log_to(function) for a tracker, or "
                "go over the loader with run.progress(loader), which shows the values"
            )
        numbers = {name: _number(name, value) for name, value in values.items()}
        step = int(step)
        self._shown = [f"{name} {number:.4g}" for name, number in numbers.items()]
        if self._folder is not None:
            self._folder.append_step(step, numbers)
        for function in self.functions:
            function(numbers, step)

    def watch(self, loader: Loader) -> Iterator[Any]:
        """See `Run.progress`."""
        if not self._world.is_root:
            return iter(loader)
        self._display = self._display or Display(_LINE_EVERY_S)
        return self._watch(loader, self._display)

    def _watch(self, loader: Loader, display: Display) -> Iterator[Any]:
        samples, done = loader.epoch_samples, loader.start
        try:
            for number, batch in enumerate(loader, 1):
                name = f"epoch {loader.epoch}" if loader.training else "evaluation"
                name += f"/{self.epochs.stop}" * (loader.training and loader.epoch - 1 in self.epochs)
                display.show(name, done, samples, self._shown, loader.unit)
                yield batch
                done = loader.taken if loader.training else loader.samples_after(number)
                done = min(done, samples or sys.maxsize)
        finally:  # also where the loop was left early
            display.clear()


def _number(name: str, value: Tensor | float) -> float:
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ConfigError(f"run.log takes numbers, and {name} is {what}") from None

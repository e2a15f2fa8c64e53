"""Positions of the training's loaders: in which pass each is, and after how many samples."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.data.base import Loader
from trainer.errors import ConfigError


class Positions:
    """The passes over loaders: they are noted, and those of an interrupted run are given back to its loaders.

    A loop may use several loaders in an epoch, or the same loader several times. Passes that the interrupted run has
    completed in its last epoch yield nothing when that epoch is gone over again.

    Args:
        interrupted: positions of the interrupted run, in the order in which its loaders were made; empty for a new one.
        saved_in: the loader in whose pass the run was saved; None where it was in none.
    """

    def __init__(self, interrupted: Sequence[Mapping[str, Any]], saved_in: int | None) -> None:
        self.first: Loader | None = None
        """Of the loaders that are in a pass, the one whose pass began first."""
        self.has_begun = False
        """Whether the loop over the epochs has begun. Passes before it, such as a look at a batch, do not count."""
        self._interrupted, self._saved_in = interrupted, saved_in
        self._watched: list[weakref.ref[Loader]] = []
        self._passes: Counter[Loader] = Counter()

    @property
    def loaders(self) -> list[Loader]:
        """The loaders that are still in use, in the order in which they were made."""
        return [loader for watched in self._watched if (loader := watched()) is not None]

    def watch(self, loader: Loader) -> None:
        """Follow another loader of the training."""
        self._watched.append(weakref.ref(loader))
        if self.has_begun:  # made within the loop
            self._give(len(self._watched) - 1, loader)

    def begin(self) -> None:
        """Have the loaders go on where they stopped, as the loop over the epochs begins."""
        self.has_begun = True
        self._passes.clear()
        for number, loader in enumerate(self.loaders):
            self._give(number, loader)

    def begin_epoch(self) -> None:
        """Forget the last epoch's passes, also a pass whose end its loop has not asked for."""
        self._passes.clear()
        for loader in self.loaders:
            loader.passes_done_before_resume = 0
            if loader.start and loader.start == loader.epoch_samples:
                loader.epoch, loader.start = loader.epoch + 1, 0

    def begin_pass(self, loader: Loader) -> None:
        if self.first is None:
            self.first = loader

    def was_saved_in(self, loader: Loader) -> bool:
        """Return whether the interrupted run was saved in a pass over this loader."""
        return self._saved_in is not None and loader in self.loaders[self._saved_in : self._saved_in + 1]

    def end_pass(self, loader: Loader) -> None:
        self._passes[loader] += 1
        if loader is self.first:
            self.first = None

    def state(self) -> dict[str, Any]:
        """Return the positions, and in which loader's pass this is."""
        loaders = self.loaders
        return {
            "loaders": [{**loader.state_dict(), "passes": self._passes[loader]} for loader in loaders],
            "saved_in": loaders.index(self.first) if self.first is not None else None,
        }

    def _give(self, number: int, loader: Loader) -> None:
        if number < len(self._interrupted):
            try:
                loader.load_state_dict(self._interrupted[number])
            except ConfigError as error:
                raise ConfigError(
                    f"{error}; restore that to go on, or begin in another folder, with the checkpoint's weights "
                    "(docs/surviving.md, Going on)"
                ) from None
            loader.passes_done_before_resume = self._passes[loader] = self._interrupted[number]["passes"]

"""The loaders of one run."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from trainer.config import RunConfig
from trainer.data.base import Group, Loader, Step, is_stream
from trainer.data.loader import ShardedLoader
from trainer.data.stream import StreamLoader
from trainer.errors import ConfigError
from trainer.loop.consistency import check_consistency
from trainer.strategies.base import Strategy


class Loaders:
    """Makes loaders, and remembers those of the training as long as somebody else does.

    Args:
        on_step: called with each training step before its batch is yielded, and with the loader's number.
        group: the ranks' collectives.
    """

    def __init__(
        self, strategy: Strategy, config: RunConfig, on_step: Callable[[Step, int], None], group: Group
    ) -> None:
        self._strategy, self._config = strategy, config
        self._on_step, self._group = on_step, weakref.ref(group)
        self._made: list[weakref.ref[Loader]] = []
        self.on_made: Callable[[Loader], None] | None = None
        """Called with each loader of the training that is made."""

    @property
    def training(self) -> list[Loader]:
        """Those of the training that are still in use, in the order in which they were made."""
        loaders = [loader for one in self._made if (loader := one()) is not None]
        return [loader for loader in loaders if loader.training]

    def make(self, dataset: Any, batch_size: int | None, *, training: bool, **options: Any) -> Loader:
        """See `Run.loader`. Collective."""
        if own := {"seed", "accumulate"} & set(options):
            raise ConfigError(f"run.loader takes {min(own)} from the run; set it in trainer.init")
        kind = StreamLoader if is_stream(dataset) else ShardedLoader
        if self._strategy.shards and kind is StreamLoader and not training:
            raise ConfigError(
                "an iterable dataset has another number of evaluation steps on each rank, and under this strategy each "
                "forward pass is every rank's; give a dataset with a length, or training=True"
            )
        loader: Loader = kind(
            dataset,
            batch_size,
            training=training,
            seed=self._config.seed,
            accumulate=self._config.accumulate if training else 1,
            world=self._strategy.world,
            on_step=partial(_call, self._on_step, len(self._made)),
            group=self._group(),
            **options,
        )
        self._strategy.follow_loader(loader)
        self._made.append(weakref.ref(loader))
        check_consistency(self._strategy, loader.must_agree)
        if training and self.on_made is not None:
            self.on_made(loader)
        return loader

    def begin_at(self, epoch: int) -> None:
        """Have each loader go on with the order of an epoch."""
        for one in self._made:
            if (loader := one()) is not None:
                loader.epoch = epoch


def _call(on_step: Callable[[Step, int], None], number: int, step: Step) -> None:
    on_step(step, number)

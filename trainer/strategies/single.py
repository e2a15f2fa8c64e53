"""The strategy of a single process, which has nothing to synchronize."""

from __future__ import annotations

from trainer.cluster.world import World
from trainer.errors import ConfigError
from trainer.strategies.base import Strategy
from trainer.tuning import tune


class SingleStrategy(Strategy):
    """A single process, whose gradient is the mean gradient.

    Raises:
        ConfigError: the launcher started several processes.
    """

    def __init__(self, world: World) -> None:
        if world.size != 1:
            raise ConfigError(
                f"strategy 'single' trains alone, but {world.launcher} started {world.size} ranks; valid here is auto"
            )
        super().__init__(world)
        self.tuning = tune(world)

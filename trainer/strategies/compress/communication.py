"""Which mechanism the ranks of a strategy train by: the strategy's own, or one that all strategies share."""

from __future__ import annotations

from torch import nn

from trainer.config import RunConfig
from trainer.errors import ConfigError
from trainer.strategies.base import NamedParameters, Strategy, Synchronizer, check_dense
from trainer.strategies.compress.local_sgd import LocalSynchronizer
from trainer.strategies.compress.power_sgd import PowerSGDSynchronizer


def make_synchronizer(
    strategy: Strategy, model: nn.Module, parameters: NamedParameters, config: RunConfig
) -> Synchronizer:
    """Broadcast rank 0's weights and buffers; return what synchronizes the model as the settings ask for. Collective.

    Args:
        parameters: those of the model that require a gradient.

    Raises:
        ConfigError: the strategy cannot train this model with these settings.
    """
    if strategy.world.size == 1 or not config.shared_mechanism:
        return strategy.prepare(model, parameters, config)
    _check(strategy, model, config.shared_mechanism)
    strategy.broadcast_tensors(tensor.data for tensor in (*model.parameters(), *model.buffers()))
    if not parameters:
        return Synchronizer()
    if rank := config.powersgd_rank:
        return PowerSGDSynchronizer(parameters, strategy, rank=rank, full_updates=config.full_updates)
    return LocalSynchronizer(parameters, strategy, config)


def _check(strategy: Strategy, model: nn.Module, setting: str) -> None:
    if strategy.shards:
        name = type(strategy).__name__.removesuffix("Strategy")
        raise ConfigError(f"{setting}, and under {name} no rank has whole gradients; valid there is none")
    check_dense(model, f"{setting}, which takes")

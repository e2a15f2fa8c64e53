"""Which mechanism the ranks of a strategy train by: the strategy's own, or one that all strategies share."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from torch import Tensor, nn

from trainer.config import RunConfig
from trainer.errors import ConfigError
from trainer.strategies.base import NamedParameters, Strategy, Synchronizer, check_dense
from trainer.strategies.compress.flat import Transport
from trainer.strategies.compress.local_sgd import LocalSynchronizer, Outer, Rounds
from trainer.strategies.compress.power_sgd import PowerSGDSynchronizer

_NUMBERS = itertools.count()


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
    transport, full = _transport(strategy), config.full_updates
    if rank := config.powersgd_rank:
        return PowerSGDSynchronizer(parameters, transport, rank=rank, full_updates=full)
    outer = Outer(lr=config.outer_lr, momentum=config.outer_momentum) if config.outer_lr is not None else None
    rounds = Rounds(every=config.sync_every, full_updates=full, overlap=config.sync_overlap, outer=outer)
    return LocalSynchronizer(parameters, transport, rounds)


def _transport(strategy: Strategy) -> Transport:
    number = next(_NUMBERS)  # the messages of two models must not have the same names

    def send(flat: Tensor, name: str) -> Tensor:
        return strategy.send_gradients(flat, f"{name}.{number}")

    def start(flat: Tensor, name: str) -> Callable[[], Tensor]:
        return strategy.start_gradients(flat, f"{name}.{number}")

    return Transport(send=send, start=start, all_reduce=strategy.all_reduce, ranks=strategy.world.size)


def _check(strategy: Strategy, model: nn.Module, setting: str) -> None:
    if strategy.shards:
        name = type(strategy).__name__.removesuffix("Strategy")
        raise ConfigError(f"{setting}, and under {name} no rank has whole gradients; valid there is none")
    check_dense(model, f"{setting}, which takes")

"""Strategy: how the ranks of a job train together. A new strategy is a subclass that sums gradients in its own way."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.cluster.process_group import join_group
from trainer.cluster.world import World
from trainer.config import RunConfig
from trainer.data.base import Loader
from trainer.data.batches import move
from trainer.errors import ConfigError
from trainer.strategies.buckets import BucketSynchronizer
from trainer.strategies.collectives import Collectives
from trainer.strategies.compress.local_sgd import LocalSynchronizer
from trainer.strategies.compress.power_sgd import PowerSGDSynchronizer
from trainer.strategies.compress.whole_gradients import WIRE_TYPES
from trainer.strategies.gradients import NamedParameters, Synchronizer
from trainer.watch.failure import at_exit
from trainer.watch.recorder import Recorder


class Strategy(Collectives):
    """Turns gradients into their mean over all ranks. It knows nothing of datasets or of the training loop.

    Every rank has to make its strategy. Gradients are sent in buckets, each summed by `start_gradients`, which a
    subclass overrides; all else goes over torch.distributed's default process group.
    """

    is_connected = False
    """Whether `connect` has been called, and `close` not since."""
    shards = False
    """Whether each rank keeps only a part of the parameters and of their gradients.

    `prepare` then moves the model to the device as well.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._leave: Callable[[], object] | None = None
        self.tuning: Mapping[str, str] = {}
        """Settings that were tuned for this host, and why; for the run's record."""
        self.description = str(world)
        """Ranks and transport, for the first line of output."""
        self.flight_recorder: Recorder | None = None
        """Tells which collectives are still running; None if they return to Python only once they are completed."""

    def connect(self) -> None:
        """Make torch.distributed's default process group, unless the script has made it. Collective.

        `trainer.init` calls it once, before any other method.

        Raises:
            ConfigError: the launcher provides no rendezvous, or the script's group has other ranks than the job.
        """
        if self.world.size > 1 or self.shards:
            self.host_group, self._leave = join_group(self.world)
            at_exit(self.close)

    def close(self) -> None:
        """Leave the job. Nothing can be exchanged afterwards; a second call does nothing."""
        leave, self._leave, self.is_connected = self._leave, None, False
        if leave is not None:
            leave()

    def prepare(self, model: nn.Module, parameters: NamedParameters, config: RunConfig) -> Synchronizer:
        """Broadcast rank 0's weights and buffers, and return the synchronizer that the settings ask for.

        Args:
            model: is on the world's device already, unless the strategy `shards`.
            parameters: those of the model that require a gradient.

        Raises:
            ConfigError: the strategy cannot train this model with these settings.
        """
        is_alone = self.world.size == 1
        if config.low_communication_setting and not is_alone:
            check_dense(model, f"{config.low_communication_setting}, which takes")
        else:
            self.check(config)
        self.broadcast_tensors(tensor.data for tensor in (*model.parameters(), *model.buffers()))
        if not parameters or is_alone:
            return Synchronizer()
        if config.averages_weights:
            return LocalSynchronizer(parameters, self, config)
        if rank := config.powersgd_rank:
            return PowerSGDSynchronizer(parameters, self, rank=rank, full_updates=config.full_updates)
        return self.synchronize(model, parameters, config)

    def check(self, config: RunConfig) -> None:
        """Raise `ConfigError` for settings that the strategy does not support; by default it supports all."""
        return

    def synchronize(self, model: nn.Module, parameters: NamedParameters, config: RunConfig) -> Synchronizer:
        """Return the synchronizer of a model that is the same on all ranks, for several ranks and whole gradients."""
        return BucketSynchronizer(parameters, self, WIRE_TYPES.get(config.compression))

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to call for a prepared model; by default the model itself."""
        return model

    def current(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter by which `prepare` has replaced this parameter; by default the parameter itself."""
        return parameter

    def adopt(self, optimizer: Optimizer) -> None:
        """Give the optimizer rank 0's state, and replace the parameters that `prepare` has replaced in the model."""
        broadcast_optimizer_state(self, optimizer)

    def follow_loader(self, loader: Loader) -> None:
        """Prepare for a new loader, before it is iterated over; does nothing by default."""
        return

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Broadcast rank 0's buffers: BatchNorm's running statistics, which depend on each rank's batches."""
        self.broadcast_tensors(model.buffers())


def check_dense(model: nn.Module, taker: str) -> None:
    """Raise `ConfigError` for a module with sparse gradients.

    Args:
        taker: subject and verb of the message: "strategy 'fsdp' exchanges".
    """
    for path, module in model.named_modules():
        if getattr(module, "sparse", False):
            raise ConfigError(f"{path} has sparse gradients, and {taker} dense ones; set sparse=False")


def broadcast_optimizer_state(strategy: Strategy, optimizer: Optimizer) -> None:
    """Broadcast rank 0's optimizer state, if it has any. A fresh optimizer stays untouched.

    Horovod's `broadcast_optimizer_state` makes a fresh optimizer take a step on zero gradients to
    have a state to send, which lets weight decay shrink the weights and counts as Adam's first step.
    """
    here = optimizer.state_dict()
    state = strategy.broadcast_object(move(here["state"], torch.device("cpu")))
    if strategy.world.is_root:
        return
    if state:  # each rank keeps its groups: they were compared, and may hold what cannot be sent
        optimizer.load_state_dict({**here, "state": state})
    else:
        optimizer.state.clear()

"""From a model and an optimizer to ones that train with all other ranks."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.agreement import check_agreement, check_devices, describe_model, describe_optimizer
from trainer.batch_norm import globalize
from trainer.config import TrainerConfig
from trainer.failure import report_failures
from trainer.strategies import make_strategy
from trainer.strategies.base import Strategy
from trainer.world import current_world


def prepare(
    model: nn.Module, optimizer: Optimizer, *, strategy: str | Strategy = "auto", config: TrainerConfig | None = None
) -> tuple[nn.Module, Optimizer]:
    """For who keeps the loop: the same model and optimizer, training with all other ranks.

    Afterwards the model is on this rank's device with rank 0's weights, and `optimizer.step()` applies the
    mean of all ranks' gradients. The learning rate is left alone; `trainer.schedule` scales and warms it up.

    Args:
        model: its parameters are moved in place.
        optimizer: over the model's parameters.
        strategy: a name out of `trainer.strategies.NAMES`; "auto" goes by how the process was launched.
        config: what concerns the exchange: compression, reduction, sync_batch_norm, device and the like.

    Returns:
        The model to call and the optimizer to step.

    Raises:
        ConfigError: the strategy cannot be had, or the ranks disagree about the model.
    """
    config = config or TrainerConfig()
    joined = join(strategy, config)
    return wrap(joined, model, optimizer, config)


def join(strategy: str | Strategy, config: TrainerConfig) -> Strategy:
    """Joins the job that this process was launched into, and says on rank 0 what was tuned. Collective."""
    report_failures()
    if isinstance(strategy, Strategy):
        return strategy
    joined = make_strategy(strategy, current_world(config.device))
    if joined.world.is_root:
        tuned = "; ".join(f"{name} {choice}" for name, choice in joined.tuning.items())
        print(f"trainer: {joined.description}{'; tuned: ' + tuned if tuned else ''}", file=sys.stderr, flush=True)
    return joined


def wrap(
    strategy: Strategy, model: nn.Module, optimizer: Optimizer, config: TrainerConfig
) -> tuple[nn.Module, Optimizer]:
    """Compares the model on all ranks, then hands it to the strategy. Collective."""
    check_devices(strategy)
    check_agreement(
        strategy,
        {
            **describe_model(model),
            **describe_optimizer(optimizer),
            "PyTorch's version": torch.__version__,
            **_settings(config),
        },
    )
    model.to(strategy.world.device)
    if config.channels_last:
        model.to(memory_format=torch.channels_last)
    if config.sync_batch_norm:
        globalize(model, strategy.all_reduce)
    if config.compile:
        model.compile()
    return strategy.prepare(model, optimizer, config)


def _settings(config: TrainerConfig) -> dict[str, object]:
    # How often a rank prints and how many processes load for it is its own affair.
    private = ("log_every_s", "workers")
    return {f"setting {name}": value for name, value in config.as_dict().items() if name not in private}

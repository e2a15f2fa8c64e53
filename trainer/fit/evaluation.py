"""Evaluation: the means over a whole dataset, each sample counted once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data.base import Step
from trainer.data.loader import ShardedLoader
from trainer.errors import ConfigError
from trainer.loop.metrics import Metric
from trainer.report.callback import EpochRecord, Evaluation
from trainer.run import Run


def evaluate(
    run: Run,
    model: nn.Module,
    loader: ShardedLoader,
    loss: Callable[[Any, Any], Tensor],
    metrics: Mapping[str, Metric],
    layout: Callable[[Any], Any],
) -> Evaluation:
    """Return the means of the loss and of every metric over the loader's dataset. Collective.

    Args:
        loss: takes the model's outputs and the targets, returns the mean over the batch.
        layout: changes a batch's inputs into the order that the model is called with.
    """
    run.average_weights()
    run.strategy.broadcast_buffers(model)
    sums = torch.zeros(1 + len(metrics), dtype=torch.float64, device=run.device)
    samples = 0
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.no_grad(), run.autocast():
        for step in loader.own_samples():
            inputs, targets = pair(step)
            outputs = model(layout(inputs))
            values = [loss(outputs, targets).double() * step.count]
            values += [metric(outputs, targets) for metric in metrics.values()]
            for total, value in zip(sums, values, strict=True):
                total += value  # a view: each batch is added on the device, which nothing waits for
            samples += step.count
    for module, training in modes:  # as before: the user may have set some to eval
        module.training = training
    counts = torch.tensor([samples], dtype=torch.float64, device=run.device)
    *totals, count = run.strategy.all_reduce(torch.cat([sums, counts])).tolist()
    means = {name: total / max(count, 1) for name, total in zip(("loss", *metrics), totals, strict=True)}
    return Evaluation(metrics=means, evaluated=round(count), samples=loader.plan.samples)


def pair(step: Step) -> tuple[Any, Any]:
    """Return a batch's inputs and targets.

    Raises:
        ConfigError: the dataset's batches are something else.
    """
    if isinstance(step.batch, tuple | list) and len(step.batch) == 2:
        return step.batch[0], step.batch[1]
    raise ConfigError(
        f"Trainer takes batches of (inputs, targets), and this dataset's are of type {type(step.batch).__name__}; "
        "trainer.init() is for a loop of your own, which takes any batch"
    )


def score_of(record: EpochRecord, metric: str) -> float:
    """Return a metric of an epoch's validation.

    Raises:
        ConfigError: there is none of this name.
    """
    metrics = record.validation.metrics if record.validation is not None else {}
    if metric not in metrics:
        raise ConfigError(
            f"checkpoints are to be compared by {metric!r}; valid are the validation's metrics, "
            f"{', '.join(metrics) or 'of which there are none without a validation'}"
        )
    return metrics[metric]

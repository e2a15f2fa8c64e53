"""Losses over all ranks' rows, sums, and copies of a model in padding batches, run on every rank of one job."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, update_bn

from tests.distributed.checks_every_strategy import BATCH, assert_equal_everywhere
from tests.distributed.reference import assert_equal, make_data, make_model
from trainer import ConfigError, init
from trainer.strategies.base import Strategy

Gather = Callable[[Tensor], list[Tensor]]
Loss = Callable[[Tensor, Gather, int], Tensor]


def clip(features: Tensor, gather: Gather, rank: int) -> Tensor:
    """The contrastive loss of CLIP over all pairs, computed as a whole on every rank."""
    images, texts = (torch.cat(gather(part.contiguous())) for part in features.chunk(2, dim=1))
    logits, own = images @ texts.t(), torch.arange(len(images), device=images.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.t(), own)) / 2


def sim_clr(features: Tensor, gather: Gather, rank: int) -> Tensor:
    """The contrast of this rank's rows with all ranks' rows, a mean over its own."""
    rows = gather(features)
    before = sum(len(part) for part in rows[:rank])
    return F.cross_entropy(features @ torch.cat(rows).t(), torch.arange(len(features), device=features.device) + before)


def normalized(features: Tensor, gather: Gather, rank: int) -> Tensor:
    """The mean over this rank's rows, each divided by the norm of all."""
    loss: Tensor = (features / torch.cat(gather(features)).norm()).pow(3).sum(1).mean()
    return loss


def train_alone(model: nn.Module, data: Any, batch: int, loss: Loss) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for begin in range(0, len(data.inputs), batch):
        optimizer.zero_grad()
        loss(model(data.inputs[begin : begin + batch]), lambda rows: [rows], 0).backward()
        optimizer.step()


def check_losses_over_all_ranks_have_the_gradients_of_one_process(strategy: Strategy) -> None:
    """The last batch is uneven, or leaves ranks without samples."""
    batch = BATCH * strategy.world.size
    for rest in (0, batch - 1, 1):
        for loss in (clip, sim_clr, normalized):
            data, model, expected = make_data(2 * batch + rest), make_model(), make_model()
            train_alone(expected, data, batch, loss)
            run = init(strategy)
            wrapped, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
            for inputs, _ in run.loader(data, BATCH, shuffle=False):
                optimizer.zero_grad()
                gather: Gather = lambda rows, run=run: run.all_gather(rows, differentiable=True)  # type: ignore[misc]  # noqa: E731
                run.backward(loss(wrapped(inputs), gather, run.rank))
                optimizer.step()
            assert_equal_everywhere(strategy, model, expected, 1e-11)


def check_rows_of_another_shape_or_type_are_told_on_all_ranks(strategy: Strategy) -> None:
    run = init(strategy)
    if run.world_size == 1:
        return
    for rows in (torch.zeros(2, 3 + run.rank), torch.zeros(2).double() if run.rank else torch.zeros(2)):
        with pytest.raises(ConfigError, match=r"rows of one shape and type from all ranks; they have \[2"):
            run.all_gather(rows.to(run.device), differentiable=True)
    with pytest.raises(ConfigError, match="a tensor of at least one dimension"):
        run.all_gather(torch.tensor(1.0), differentiable=True)


def check_a_loss_that_is_a_sum_has_the_gradients_of_one_process(strategy: Strategy) -> None:
    def summed(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="sum")

    batch = BATCH * strategy.world.size
    for accumulate in (1, 2):
        data, model, expected = make_data(4 * batch + 1), make_model(), make_model()
        optimizer = torch.optim.SGD(expected.parameters(), lr=0.001)
        for begin in range(0, len(data.inputs), batch * accumulate):
            optimizer.zero_grad()
            part = slice(begin, begin + batch * accumulate)
            summed(expected(data.inputs[part]), data.targets[part]).backward()
            optimizer.step()
        run = init(strategy, accumulate=accumulate)
        wrapped, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.001))
        for inputs, targets in run.loader(data, BATCH, shuffle=False):
            run.backward(summed(wrapped(inputs), targets), reduction="sum")
            if run.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
        assert_equal(model, expected, 1e-11)


def check_a_copy_of_a_model_leaves_padding_batches_out(strategy: Strategy) -> None:
    """Of one sample in the last batch, all ranks but one have none. A copy runs beside the model, as a mean teacher."""
    if strategy.shards:  # which torch does not copy
        return
    run, batch = init(strategy, sync_batch_norm=True), BATCH * strategy.world.size
    model, data = make_model(batch_norm=True), make_data(batch + 3)
    teacher, alone = make_model(batch_norm=True), make_model(batch_norm=True)
    wrapped, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    teacher = copy.deepcopy(model)
    for inputs, targets in run.loader(data, BATCH, shuffle=False):
        teacher(inputs)
        run.backward(F.cross_entropy(wrapped(inputs), targets))
    for begin in (0, batch):
        alone(data.inputs[begin : begin + batch].to(next(alone.parameters()).device))
    assert_equal(teacher, alone, 1e-11)
    averaged, expected = AveragedModel(model), AveragedModel(make_model(batch_norm=True))
    update_bn((inputs for inputs, _ in run.loader(data, BATCH, shuffle=False)), averaged)
    update_bn((data.inputs[begin : begin + batch] for begin in (0, batch)), expected)
    assert_equal(averaged, expected, 1e-11)


def check_a_model_of_an_earlier_run_leaves_the_padding_batches_of_this_one_out(strategy: Strategy) -> None:
    if strategy.shards:
        return
    batch = BATCH * strategy.world.size
    data, model, alone = make_data(batch + 3), make_model(batch_norm=True), make_model(batch_norm=True)
    for _ in range(2):
        run = init(strategy, sync_batch_norm=True)
        wrapped, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        for inputs, targets in run.loader(data, BATCH, shuffle=False):
            run.backward(F.cross_entropy(wrapped(inputs), targets))
        for begin in (0, batch):
            alone(data.inputs[begin : begin + batch])
    assert_equal(model, alone, 1e-11)


def check_samples_in_a_padding_batch_count_nothing(strategy: Strategy) -> None:
    batch = BATCH * strategy.world.size
    data, model, expected = make_data(batch + 1), make_model(), make_model()
    train_alone(expected, data, batch, lambda outputs, *_: outputs.square().mean(1).mean())
    run = init(strategy)
    wrapped, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for inputs, _ in run.loader(data, BATCH, shuffle=False):
        optimizer.zero_grad()
        run.backward(wrapped(inputs).square().mean(1).mean(), samples=len(inputs))
        optimizer.step()
    assert_equal(model, expected, 1e-11)

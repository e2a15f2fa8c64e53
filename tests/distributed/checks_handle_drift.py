"""Ranks that drift apart without an error of their own are told; run on every rank of one job."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.distributed.checks_every_strategy import BATCH, assert_same_on_all_ranks
from tests.distributed.reference import make_data, make_model, sgd
from trainer import ConfigError, init
from trainer.strategies.base import Strategy


@contextlib.contextmanager
def told_where_there_are_several_ranks(strategy: Strategy, message: str) -> Iterator[None]:
    if strategy.world.size == 1:
        yield
        return
    with pytest.raises(ConfigError, match=message):
        yield


def train(run: Any, model: nn.Module, optimizer: Any, schedule: Any = None) -> None:
    for number, (inputs, targets) in enumerate(run.loader(make_data(4 * BATCH * run.world_size), BATCH)):
        run.backward(F.cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule(number)


def check_a_learning_rate_that_one_rank_has_lowered_is_told(strategy: Strategy) -> None:
    run, model = init(strategy), make_model()
    forward, optimizer = run.prepare(model, sgd(model))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    # The last rank steps once, as a ReduceLROnPlateau on the ranks' own losses may.
    def lower(number: int) -> None:
        if number == 0 and run.rank == run.world_size - 1:
            schedule.step()

    message = "ranks disagree about lr of the optimizer's group 0: rank 0 on host .* has 0.1, .* has 0.05"
    with told_where_there_are_several_ranks(strategy, message):
        train(run, forward, optimizer, lower)


def check_a_loader_that_one_rank_has_begun_before_is_told(strategy: Strategy) -> None:
    """The ranks' epochs would have other orders: some samples twice, some never."""
    run, model, data = init(strategy), make_model(), make_data(4 * BATCH * strategy.world.size)
    forward, optimizer = run.prepare(model, sgd(model))
    loader = run.loader(data, BATCH)
    if run.is_root:
        next(iter(loader))  # a look at the data
    with told_where_there_are_several_ranks(
        strategy, r"the loader's epoch \(from 0\): rank 0 .* has 1, rank 1 .* has 0"
    ):
        for inputs, targets in loader:
            run.backward(F.cross_entropy(forward(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


def check_batches_of_ones_own_are_told_once(strategy: Strategy) -> None:
    run, model = init(strategy), make_model()
    data = make_data(BATCH).to(run.device)
    forward, optimizer = run.prepare(model, sgd(model))
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        for _ in range(3):
            run.backward(F.cross_entropy(forward(data.inputs), data.targets))
            optimizer.step()
            optimizer.zero_grad()
        train(run, forward, optimizer)
    is_told = run.is_root and run.world_size > 1
    assert printed.getvalue().count("trainer: WARNING: run.backward without a batch of run.loader") == is_told


def check_ranks_may_take_other_numbers_of_passes_without_an_exchange(strategy: Strategy) -> None:
    run, model, data = init(strategy), make_model(), make_data(BATCH).to(strategy.world.device)
    forward, optimizer = run.prepare(model, sgd(model))
    for _ in range(4):
        for _ in range(run.rank):
            with run.no_sync():
                run.backward(F.cross_entropy(forward(data.inputs), data.targets))
        run.backward(F.cross_entropy(forward(data.inputs), data.targets))
        optimizer.step()
        optimizer.zero_grad()
    assert_same_on_all_ranks(strategy, model)

"""Ranks that drift apart without an error of their own are told; run on every rank of one job."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.distributed.checks_every_strategy import BATCH, assert_same_on_all_ranks, train_on
from tests.distributed.reference import make_data, make_model, sgd
from trainer import ConfigError, TrainerError, init
from trainer.strategies.base import Strategy


@contextlib.contextmanager
def told_where_there_are_several_ranks(
    strategy: Strategy, message: str, kind: type[Exception] = ConfigError
) -> Iterator[None]:
    if strategy.world.size == 1:
        yield
        return
    with pytest.raises(kind, match=message):
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
    # The odd one out is rank 0; of two ranks, neither is.
    message = r"ranks have drawn different batches .* is at batch [12] of loader 0, in its epoch [01] .*or has begun"
    with told_where_there_are_several_ranks(strategy, message, TrainerError):
        train_on(run, loader, forward, optimizer)


def check_a_batch_that_is_the_same_on_two_ranks_is_told_once(strategy: Strategy) -> None:
    """Unless each rank's loss is over other samples of it, as over other nodes of a graph."""
    for kind in ("same", "other inputs", "other rows"):
        run, model = init(strategy), make_model()
        data = make_data(BATCH).to(run.device)
        rows = (
            torch.arange(BATCH, device=run.device) % run.world_size == run.rank if kind == "other rows" else slice(None)
        )
        forward, optimizer = run.prepare(model, sgd(model))
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            for _ in range(3):
                outputs = forward(data.inputs + (kind == "other inputs") * run.rank)
                run.backward(F.cross_entropy(outputs[rows], data.targets[rows]))
                optimizer.step()
                optimizer.zero_grad()
            train(run, forward, optimizer)
        told = run.is_root and run.world_size > 1 and kind == "same"
        assert printed.getvalue().count("ranks 0 and 1 have trained on the same batch") == told, printed.getvalue()


def check_ranks_that_seed_later_epochs_alike_are_told_once(strategy: Strategy) -> None:
    run, model = init(strategy), make_model()
    forward, optimizer = run.prepare(model, sgd(model))
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        for epoch in range(3):
            train(run, forward, optimizer)
            torch.manual_seed(epoch)
    told = run.is_root and run.world_size > 1
    assert printed.getvalue().count("ranks 0 and 1 draw the same random numbers") == told, printed.getvalue()


def check_each_rank_draws_numbers_of_its_own(strategy: Strategy) -> None:
    for seeds_late in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        run, model = init(strategy), nn.Linear(4, 1)
        state = torch.get_rng_state()
        forward, _ = run.prepare(model, sgd(model))
        if run.is_root:  # as one process does
            assert torch.equal(torch.get_rng_state(), state)
        if seeds_late:
            torch.manual_seed(1337)
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            inputs = torch.randn(2, 4, device="cpu").to(run.device)
            run.backward(forward(inputs).sum())
        drawn = run.all_gather((inputs.sum().item(), random.random(), np.random.rand()))
        for place, numbers in enumerate(zip(*drawn, strict=True)):
            assert len(set(numbers)) == (1 if seeds_late and place == 0 else run.world_size)
        told = run.is_root and seeds_late and run.world_size > 1
        assert ("draw the same random numbers" in printed.getvalue()) == told


def check_ranks_that_part_are_told(strategy: Strategy) -> None:
    """One skips a batch, loads other weights, takes another step, or has a bit flipped: the rank and what is named."""
    if strategy.world.size == 1 or strategy.shards:
        return
    last = strategy.world.size - 1
    skipped = r"ranks have drawn different batches .*rank \d.* is at batch \d of loader 0, .*`continue`"
    weights = rf"the weights of rank {last} on host .* are not those of rank 0.*, first in 0\.weight"
    for kind, message in (("skip", skipped), ("load", weights), ("step", weights), ("flip", weights)):
        with pytest.raises(TrainerError, match=message):
            part(strategy, kind, last)
        strategy.barrier()


def part(strategy: Strategy, kind: str, last: int) -> None:
    """Train, and have the last rank do something else in its second batch."""
    run, model = init(strategy), make_model()
    forward, optimizer = run.prepare(model, sgd(model))
    for number, (inputs, targets) in enumerate(run.loader(make_data(9 * BATCH * run.world_size), BATCH)):
        is_other = number == 1 and run.rank == last
        if is_other and kind == "skip":
            continue
        if is_other and kind == "load":
            model.load_state_dict({name: one + 1 for name, one in model.state_dict().items()})
        if is_other and kind == "flip":
            next(model.parameters()).data.view(-1)[3:4].view(torch.uint8)[0] ^= 1
        optimizer.zero_grad()
        run.backward(F.cross_entropy(forward(inputs), targets))
        optimizer.step()
        for parameter in model.parameters() if is_other and kind == "step" else ():
            parameter.data.sub_(1.0)


def check_the_rank_whose_loss_is_not_finite_is_told_once(strategy: Strategy) -> None:
    """Unless the ranks skip that step, as a GradScaler has them do."""
    last = strategy.world.size - 1
    for is_skipped in (False, True):
        run, model = init(strategy), make_model()
        forward, optimizer = run.prepare(model, sgd(model))
        loader = run.loader(make_data(6 * BATCH * run.world_size), BATCH)
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            for number, (inputs, targets) in [*enumerate(loader), *enumerate(loader, 6)]:
                loss = F.cross_entropy(forward(inputs), targets)
                run.backward(loss * (torch.nan if number == 5 and run.rank == last else 1))
                if number != 5 or not is_skipped:
                    optimizer.step()
                optimizer.zero_grad()
        told = run.is_root and last > 0 and not is_skipped
        assert printed.getvalue().count(f"the loss of rank {last} on host {run.host} was the first that") == told
        assert printed.getvalue().count("not finite, in update 6,") == told


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


class Codebook(nn.Module):
    """Learns a buffer from the samples it sees, as a VQ-VAE does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = make_model()
        self.register_buffer("codes", torch.zeros(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.codes += inputs.mean()  # type: ignore[operator]
        outputs: torch.Tensor = self.linear(inputs)
        return outputs


def check_a_buffer_that_each_rank_changes_is_told_once(strategy: Strategy) -> None:
    if strategy.shards:  # whose parameters are compared by no rank
        return
    run, model = init(strategy), Codebook()
    forward, optimizer = run.prepare(model, sgd(model))
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        train(run, forward, optimizer)
    told = run.is_root and run.world_size > 1
    assert printed.getvalue().count("buffer codes is not the same on ranks") == told, printed.getvalue()
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        run, with_statistics = init(strategy), make_model(batch_norm=True)
        train(run, *run.prepare(with_statistics, sgd(with_statistics)))
    assert "buffer" not in printed.getvalue()

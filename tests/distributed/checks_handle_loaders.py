"""The handle's loaders and `prepare`, the same under every strategy; run on every rank of one job."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, random_split

from tests.distributed.checks_every_strategy import BATCH, assert_equal_everywhere, train_on, train_one
from tests.distributed.reference import assert_equal, make_data, make_model, sgd, train_alone
from trainer import ConfigError, InMemory, init
from trainer.strategies.base import Strategy

CLIP = 0.05


def check_a_model_may_be_prepared_again(strategy: Strategy) -> None:
    model, alone, data = make_model(), make_model(), make_data(2 * BATCH * strategy.world.size)
    for _ in range(2):  # the second time with a new optimizer, as for a second stage of a training
        alone = train_alone(alone, data, batch=BATCH * strategy.world.size)
        run = init(strategy)
        forward, optimizer = run.prepare(model, sgd(model))
        train_one(run, forward, optimizer, data)
    assert_equal_everywhere(strategy, model, alone, 1e-12)


def check_a_global_batch_is_the_same_on_any_number_of_ranks(strategy: Strategy) -> None:
    for batch in (7, 12, strategy.world.size - 1 or 1):
        model, data = make_model(), make_data(31)
        expected = train_alone(model, data, batch=batch)
        run = init(strategy)
        forward, optimizer = run.prepare(model, sgd(model))
        train_on(run, run.loader(data, global_batch_size=batch), forward, optimizer)
        assert_equal_everywhere(strategy, model, expected, 1e-12)


def check_a_data_loader_of_the_script_trains_as_in_one_process(strategy: Strategy) -> None:
    """Over two epochs of its own order, whose last batch is too small for all ranks."""
    size = strategy.world.size
    model, data, batch = make_model(), make_data(6 * size + 1), 2 * size

    def given() -> DataLoader[Any]:
        return DataLoader(data, batch, shuffle=True, generator=torch.Generator().manual_seed(7))

    alone, alone_with = copy.deepcopy(model), given()
    by_hand = sgd(alone)
    run = init(strategy)
    forward, optimizer, loader, test = run.prepare(model, sgd(model), given(), evaluation=DataLoader(data, batch))
    for _ in range(2):
        for inputs, targets in alone_with:
            by_hand.zero_grad()
            F.cross_entropy(alone(inputs), targets).backward()
            by_hand.step()
        train_on(run, loader, forward, optimizer)
    assert_equal(model, alone, 1e-12)
    assert run.all_reduce(sum(len(targets) for _, targets in test), "sum") == len(data)


def check_a_mean_over_tokens_is_one_over_those_of_all_ranks(strategy: Strategy) -> None:
    """Also where the batches of an update have different numbers of them, and some have none."""
    size, data = strategy.world.size, make_data(5 * BATCH * strategy.world.size + 3)
    ignored = torch.rand(len(data), generator=torch.Generator().manual_seed(5)) < 0.7
    data = InMemory(data.inputs, data.targets.masked_fill(ignored, -100))  # cross_entropy leaves -100 out
    for accumulate in (1, 3):
        model = make_model()
        expected = train_alone(model, data, batch=BATCH * size * accumulate)
        run = init(strategy, accumulate=accumulate)
        forward, optimizer = run.prepare(model, sgd(model))
        train_on(run, run.loader(data, BATCH, weigh_by=lambda batch: (batch[1] != -100).sum()), forward, optimizer)
        assert_equal_everywhere(strategy, model, expected, 1e-12)


def check_a_batch_that_counts_for_nothing_has_no_gradient(strategy: Strategy) -> None:
    """Also where its loss is 0 / 0."""
    data, size = make_data(2 * BATCH * strategy.world.size), strategy.world.size
    last = torch.arange(len(data)) % (BATCH * size) >= BATCH * (size - 1)  # of the last rank; on one rank of that
    masked = last if size > 1 else torch.arange(len(data)) < BATCH
    data = InMemory(data.inputs, data.targets.masked_fill(masked, -100))

    def loss_of(outputs: Any, targets: Any) -> Any:
        mask = targets >= 0
        return (F.cross_entropy(outputs, targets.clamp(min=0), reduction="none") * mask).sum() / mask.sum()

    with_statistics = make_model(batch_norm=True)
    run = init(strategy, sync_batch_norm=True)
    forward = run.prepare(with_statistics)
    for inputs, targets in run.loader(data, BATCH, shuffle=False, weigh_by=lambda batch: (batch[1] >= 0).sum()):
        run.backward(loss_of(forward(inputs), targets))  # what is NaN goes through BatchNorm to no other rank
    assert all(bool(p.grad.isfinite().all()) for p in with_statistics.parameters() if p.grad is not None)

    model, alone = make_model(), make_model()
    run = init(strategy)
    forward, optimizer = run.prepare(model, sgd(model))
    by_hand = sgd(alone)
    loader = run.loader(data, BATCH, shuffle=False, weigh_by=lambda batch: (batch[1] >= 0).sum())
    for number, (inputs, targets) in enumerate(loader):
        run.backward(loss_of(forward(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        whole = slice(number * BATCH * size, (number + 1) * BATCH * size)
        if (data.targets[whole] >= 0).any():
            loss_of(alone(data.inputs[whole]), data.targets[whole]).backward()
        else:
            by_hand.zero_grad(set_to_none=False)
            for parameter in alone.parameters():
                parameter.grad = torch.zeros_like(parameter)
        by_hand.step()
        by_hand.zero_grad()
    assert_equal_everywhere(strategy, model, alone, 1e-12)


def check_a_split_that_each_rank_draws_by_itself_is_told(strategy: Strategy) -> None:
    torch.manual_seed(0)
    run = init(strategy)
    run.prepare(make_model())  # from here on each rank draws numbers of its own
    data: Any = [*range(64)]
    split, _ = random_split(data, [48, 16])
    same, _ = random_split(data, [48, 16], torch.Generator().manual_seed(0))
    assert len(run.loader(Subset(same, range(4)), 1, shuffle=False)) == -(-4 // strategy.world.size)
    if strategy.world.size == 1:
        return
    with pytest.raises(ConfigError, match=r"ranks disagree about which samples a Subset has \(draw the split before"):
        run.loader(Subset(split, range(4)), 1)


def check_data_that_differ_are_told_and_parts_of_each_rank_are_trained_on_whole(strategy: Strategy) -> None:
    rank, size = strategy.world.rank, strategy.world.size
    part, run = [100 * rank + place for place in range(9)], init(strategy)
    with redirect_stderr(StringIO()) as said:
        assert len(list(run.loader(part, 9))) == 1
    assert ("item 0 of the dataset is not the same on ranks 0 and 1" in said.getvalue()) is (rank == 0 < size - 1)
    with redirect_stderr(StringIO()) as said:
        loader = run.loader([*part, *range(rank)], 2, already_sharded=True)
        epochs = [[number for batch in loader for number in batch.tolist()] for _ in range(2)]
    assert said.getvalue() == ""
    assert epochs[0] != epochs[1]
    for drawn in epochs:
        assert sorted(set(drawn)) == sorted({*part, *range(rank)})


def check_a_sampler_draws_the_order_for_all_ranks(strategy: Strategy) -> None:
    """Also one whose numbers differ between ranks: rank 0's order counts."""

    class Own(list[int]):
        def __iter__(self) -> Iterator[int]:
            return iter([(strategy.world.rank + place) % 8 for place in range(8)])

    run = init(strategy)
    loader = run.loader(make_data(8), global_batch_size=8, sampler=Own(range(8)))
    (batch,) = loader
    whole = [label for labels in run.all_gather(batch[1].tolist()) for label in labels]
    assert whole[:8] == make_data(8).targets.tolist()

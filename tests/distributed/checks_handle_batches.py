"""The handle's loaders of batches that are not cut, the same under every strategy; run on every rank of one job."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.checks_checkpoints import Interrupted, shared_folder
from tests.distributed.checks_every_strategy import assert_same_on_all_ranks, train_on
from tests.distributed.reference import assert_equal, make_data, make_model, sgd
from trainer import InMemory, init
from trainer.models.sharded import gather
from trainer.strategies.base import Strategy

Batches = list[list[int]]


def make_batches(strategy: Strategy) -> tuple[InMemory, Batches]:
    """Batches of two to five samples; the last update has fewer than the others, and the last step empty ranks."""
    sizes = [2 + place * 7 % 4 for place in range(5 * strategy.world.size + 1)]
    ends = list(itertools.accumulate(sizes))
    return make_data(ends[-1]), [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def train_alone(model: nn.Module, data: InMemory, batches: Batches, in_an_update: int) -> None:
    """Plain PyTorch: each update's mean is over the samples of all its batches."""
    optimizer = sgd(model)
    for first in range(0, len(batches), in_an_update):
        whole = list(itertools.chain.from_iterable(batches[first : first + in_an_update]))
        optimizer.zero_grad()
        F.cross_entropy(model(data.inputs[whole]), data.targets[whole]).backward()
        optimizer.step()


def train(strategy: Strategy, model: nn.Module, *arguments: Any, **options: Any) -> None:
    """Train for an epoch over a loader."""
    settings = {name: options.pop(name) for name in ("accumulate", "sync_batch_norm") if name in options}
    run = init(strategy, **settings)
    forward, optimizer = run.prepare(model, sgd(model))
    train_on(run, run.loader(*arguments, **options), forward, optimizer)
    assert_same_on_all_ranks(strategy, model)


def check_batches_of_a_batch_sampler_train_as_one_process_does(strategy: Strategy) -> None:
    data, batches = make_batches(strategy)
    rows = [data[place] for place in range(len(data))]
    for accumulate, dataset, options in ((1, data, {}), (2, rows, {"num_workers": 1})):
        model, alone = make_model(), make_model()
        train_alone(alone, data, batches, accumulate * strategy.world.size)
        train(strategy, model, dataset, batch_sampler=batches, accumulate=accumulate, **options)
        assert_equal(model, alone, 1e-12)
    # BatchNorm over the global batch, whose padding batches are left out.
    model, alone = make_model(batch_norm=True), make_model(batch_norm=True)
    train_alone(alone, data, batches, strategy.world.size)
    train(strategy, model, data, batch_sampler=batches, sync_batch_norm=True)
    assert_equal(model, alone, 1e-11)


def check_a_stream_of_batches_trains_as_one_process_does(strategy: Strategy) -> None:
    """Each rank has a stream of its own; the others end before the first one's last batch."""

    class Own:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            for batch in batches[strategy.world.rank :: strategy.world.size]:
                yield data.inputs[batch], data.targets[batch]

    data, batches = make_batches(strategy)
    for accumulate in (1, 2):
        model, alone = make_model(), make_model()
        train_alone(alone, data, batches, accumulate * strategy.world.size)
        train(strategy, model, Own(), batch_size=None, already_sharded=True, accumulate=accumulate)
        assert_equal(model, alone, 1e-12)


class Drawn:
    """Draws the batches in an order of PyTorch's random numbers, which differ between ranks, and one less each time."""

    def __init__(self, batches: Batches) -> None:
        self._batches, self._left = batches, len(batches)

    def __len__(self) -> int:
        return len(self._batches)

    def set_epoch(self, epoch: int) -> None:
        self._left = len(self._batches) - epoch

    def __iter__(self) -> Iterator[list[int]]:
        return (self._batches[place] for place in torch.randperm(len(self._batches))[: self._left])


def check_an_evaluation_takes_each_batch_once(strategy: Strategy) -> None:
    data, batches = make_batches(strategy)
    ready = [torch.tensor(batch) for batch in batches]
    run = init(strategy)
    for loader in (
        run.loader(range(len(data)), batch_sampler=Drawn(batches), training=False),
        run.loader(ready, batch_size=None, training=False),
    ):
        torch.manual_seed(run.rank)
        seen = list(itertools.chain.from_iterable(run.all_gather([batch.tolist() for batch in loader])))
        assert sorted(seen) == batches


def check_an_evaluation_may_be_kept_while_batches_are_trained_on(strategy: Strategy) -> None:
    """With an uneven number of samples, of which ranks have other numbers of batches."""
    size, numbers = strategy.world.size, make_data(13 * strategy.world.size).targets.double()
    run = init(strategy)
    kept = iter(run.loader([*range(2 * size + 1)], 1, training=False))
    for _ in range(2):
        mean = run.mean()
        for values in run.loader(numbers, 5):
            mean.add(values.double().mean())
            next(kept, None)
        assert abs(mean.read() - numbers.mean().item()) < 1e-12


def check_a_pass_over_drawn_batches_goes_on_where_it_was_interrupted(strategy: Strategy) -> None:
    data, batches = make_batches(strategy)

    def train_in(folder: Path, stop_after: int) -> Tensor:
        run, model = init(strategy, accumulate=2), make_model()
        forward, optimizer = run.prepare(model, sgd(model))
        loader, updates = run.loader(data, batch_sampler=Drawn(batches)), 0
        checkpoints = run.checkpoints(folder, every_updates=1, keep=2)
        torch.manual_seed(run.rank)
        try:
            for _ in run.epochs(3):
                for inputs, targets in loader:
                    if updates == stop_after:
                        raise Interrupted
                    run.backward(F.cross_entropy(forward(inputs), targets))
                    if run.sync_gradients:
                        optimizer.step()
                        optimizer.zero_grad()
                        updates += 1
        finally:
            checkpoints.close()
        return torch.cat([gather(one.detach()).cpu().flatten() for one in model.parameters()])

    with shared_folder(strategy) as folder:
        whole = train_in(folder.parent / "whole", -1)
        for stop_after in (1, 2, 3):
            with pytest.raises(Interrupted):
                train_in(folder, stop_after)
            strategy.barrier()
        torch.testing.assert_close(train_in(folder, -1), whole, rtol=1e-12, atol=1e-13)

"""The handle's loaders of iterable datasets, the same under every strategy; run on every rank of one job."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from tests.distributed.checks_every_strategy import BATCH, assert_equal_everywhere, train_on
from tests.distributed.reference import make_data, make_model, sgd
from trainer import ConfigError, InMemory, StreamLoader, init
from trainer.strategies.base import Strategy

SAMPLES = 7 * BATCH


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The samples from `first` to `last` - 1, in this order."""

    def __init__(self, data: InMemory, first: int = 0, last: int = SAMPLES) -> None:
        self._data, self._first, self._last = data, first, last

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self._data[place] for place in range(self._first, self._last))


class Sharded(Stream):
    """The same, with a length, in parts of different lengths."""

    def __len__(self) -> int:
        return self._last - self._first

    def shard(self, num_shards: int, index: int) -> Sharded:
        # Rank 0 gets most: the others have one sample each and rank 1, where there is one, a batch and a half.
        cuts = [0, SAMPLES - BATCH - BATCH // 2 - num_shards, *range(SAMPLES - num_shards + 2, SAMPLES), SAMPLES]
        return Sharded(self._data, *cuts[index : index + 2]) if num_shards > 1 else self


def batches_of(strategy: Strategy, data: InMemory, accumulate: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what the ranks together take in each update."""
    size = strategy.world.size
    parts = [Sharded(data).shard(size, rank) for rank in range(size)]
    for first in range(0, SAMPLES, BATCH * accumulate):
        drawn = [list(itertools.islice(part, first, first + BATCH * accumulate)) for part in parts]
        samples = list(itertools.chain.from_iterable(drawn))
        if samples:
            yield torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


def check_a_stream_trains_as_one_process_does_on_what_all_ranks_have_drawn(strategy: Strategy) -> None:
    data = make_data(SAMPLES)
    for accumulate in (1, 3):
        model, alone = make_model(), make_model()
        optimizer = sgd(alone)
        for inputs, targets in batches_of(strategy, data, accumulate):
            optimizer.zero_grad()
            F.cross_entropy(alone(inputs), targets).backward()
            optimizer.step()
        run = init(strategy, accumulate=accumulate)
        forward, optimizer = run.prepare(model, sgd(model))
        train_on(run, run.loader(Sharded(data), BATCH), forward, optimizer)
        assert_equal_everywhere(strategy, model, alone, 1e-12)


def check_streams_of_their_own_give_every_sample_once(strategy: Strategy) -> None:
    """Also where no rank knows how long its stream is."""
    data, rank = make_data(SAMPLES), strategy.world.rank
    run = init(strategy)
    for training in (True, False):
        if strategy.shards and not training:
            with pytest.raises(ConfigError, match="another number of evaluation steps on each rank"):
                run.loader(Stream(data, 0, 1), BATCH, training=False, already_sharded=True)
            return
        loader = run.loader(Stream(data, 0, BATCH * rank + 1), BATCH, training=training, already_sharded=True)
        seen = 0
        for inputs, _ in loader:
            seen += run.batch_samples if training else len(inputs)
        assert seen == BATCH * rank + 1
        whole = sum(BATCH * one + 1 for one in range(run.world_size))
        assert int(run.all_reduce(seen, "sum")) == whole
        assert isinstance(loader, StreamLoader)
        assert not training or loader.samples == whole


def check_a_rank_whose_stream_has_ended_keeps_its_statistics(strategy: Strategy) -> None:
    data, rank = make_data(SAMPLES), strategy.world.rank
    run, model = init(strategy), make_model(batch_norm=True)
    for _ in range(2):  # the second time as for a second stage of a training
        forward, optimizer = run.prepare(model, sgd(model))
    loader = run.loader(Stream(data, 0, BATCH * (1 + rank)), BATCH, already_sharded=True)
    seen: list[tuple[int, Tensor]] = []
    for inputs, targets in loader:
        run.backward(F.cross_entropy(forward(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        seen.append((run.batch_samples, model.state_dict()["1.running_mean"].clone()))
    assert len(seen) == run.world_size
    for (_, before), (samples, after) in itertools.pairwise(seen):
        assert torch.equal(before, after) is (samples == 0)
    assert [layer.momentum for layer in model.modules() if isinstance(layer, torch.nn.BatchNorm2d)] == [0.1]

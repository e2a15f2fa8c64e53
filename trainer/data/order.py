"""The order in which an epoch takes a dataset's samples, the same on every rank."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler, Sampler

from trainer.data.base import Group
from trainer.data.shard_plan import mix_seeds, permutation
from trainer.errors import ConfigError


class EpochOrder:
    """Shuffled, as the dataset lies, or drawn by a sampler.

    Args:
        dataset_length: samples in the dataset.
        sampler: draws each epoch's samples; its length is the epoch's.
        group: the ranks' collectives, by which all ranks take what rank 0's sampler has drawn.

    Raises:
        ConfigError: the sampler has no length, cuts batches, or divides the samples itself.
    """

    def __init__(
        self, dataset_length: int, *, shuffle: bool, seed: int, sampler: Sampler[int] | None, group: Group | None
    ) -> None:
        self.samples = dataset_length if sampler is None else _length_of(sampler)
        """Samples in an epoch, before any are left out."""
        self.description = type(sampler).__name__ if sampler is not None else shuffle
        self._dataset_length, self._shuffle, self._seed = dataset_length, shuffle, seed
        self._sampler, self._group = sampler, group

    def of(self, epoch: int) -> Tensor:
        """Return the places of an epoch's samples in the dataset: int64, shape (samples,). Collective with a sampler.

        Raises:
            ConfigError: the sampler has drawn more or fewer than its length.
        """
        if self._sampler is not None:
            return self._draw(self._sampler, mix_seeds(self._seed, epoch))
        if self._shuffle:
            return permutation(self._dataset_length, epoch=epoch, seed=self._seed)
        return torch.arange(self._dataset_length)

    def _draw(self, sampler: Sampler[int], seed: int) -> Tensor:
        if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
            generator.manual_seed(seed)
        with _seeded(seed):  # what the model draws stays the same
            drawn = [int(index) for index in sampler]
        if self._group is not None:
            drawn = self._group.broadcast(drawn)
        if len(drawn) != self.samples:
            raise ConfigError(f"the sampler has drawn {len(drawn)} samples, and its length is {self.samples}")
        return torch.tensor(drawn, dtype=torch.int64)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Give a context in which Python's, NumPy's and PyTorch's generators begin with a seed."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _length_of(sampler: Any) -> int:
    if isinstance(sampler, BatchSampler):
        raise ConfigError("a loader cuts the batches itself, and takes a sampler of samples; leave BatchSampler out")
    if isinstance(sampler, DistributedSampler):
        raise ConfigError("a loader divides the samples among the ranks itself; leave DistributedSampler out")
    if not hasattr(sampler, "__len__"):
        raise ConfigError(f"{type(sampler).__name__} has no __len__, so that ranks cannot plan their steps")
    return len(sampler)

"""What a sampler draws: the same whatever was drawn before, so that an epoch's order can be drawn again."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from trainer.data.shard_plan import mix_seeds


def draw(sampler: Iterable[Any], *, epoch: int, seed: int) -> list[Any]:
    """Return what a sampler, or a batch sampler, draws in an epoch.

    Its random numbers come from `seed` and `epoch`, be they those of a generator that it or a sampler within it holds,
    or Python's, NumPy's and PyTorch's own; what others draw of these stays the same. `set_epoch` is called where a
    sampler has one.
    """
    mixed = mix_seeds(seed, epoch)
    with _seeded(mixed):
        for number, one in enumerate(samplers_in(sampler)):
            if callable(getattr(one, "set_epoch", None)):
                one.set_epoch(epoch)
            for held in _held_by(one).values():
                _seed(held, (mixed + number) % 2**63)
        return list(sampler)


def samplers_in(sampler: Any) -> list[Any]:
    """Return a sampler and those that it draws from, at any depth."""
    found: list[Any] = []
    waiting = [sampler]
    while waiting:
        one = waiting.pop(0)
        if not any(one is other for other in found):
            found.append(one)
            waiting += [held for name, held in _held_by(one).items() if name in _NAMES or isinstance(held, Sampler)]
    return found


_NAMES = ("sampler", "batch_sampler")


def _held_by(sampler: Any) -> dict[str, Any]:
    return getattr(sampler, "__dict__", {})


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    elif isinstance(generator, random.Random | np.random.RandomState):
        generator.seed(seed % 2**32)


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

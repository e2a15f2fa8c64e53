"""Digests of some items of a dataset, by which ranks find out that they hold different data."""

from __future__ import annotations

import copy
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice, zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from trainer.data.base import Digests
from trainer.data.batches import batches_of
from trainer.data.order import GENERATORS, held_by, seed_globally
from trainer.data.permutation import Permutation

_MOST_ITEMS, _LEAST_ITEMS, _ENOUGH_S = 32, 4, 0.005
"""Items that are drawn; as few as the second number where the drawing takes so many seconds."""
_MOST_VALUES, _MOST_LISTED, _MOST_PARTS, _DEEPEST = 4096, 512, 64, 8
"""Of a tensor and of an attribute, values that count, evenly spaced; of an item, parts, and how deep they may be."""
_ATTRIBUTES = ("samples", "targets", "indices", "files", "_fingerprint")


def digest_items(make: Callable[..., DataLoader[Any]], dataset: Any, length: int) -> Digests:
    """Return digests of some items of a dataset; if they are random, also of attributes that tell what is in it.

    Each item is drawn twice, with the global random generators in the same state: a part that differs then is random.
    With workers, a worker draws, because what a dataset opens for its first item may not survive a fork. Without them,
    the global generators of this process have another state afterwards.

    Args:
        make: makes the DataLoader of a dataset, with its workers.
        length: items in the dataset.
    """
    places = Permutation(length, seed=0).at(np.arange(min(length, _MOST_ITEMS), dtype=np.uint64)).tolist()
    data_loader = make(dataset, batch_sampler=[[places[0]], *([place] for place in places for _ in range(2))])
    data_loader.collate_fn, data_loader.pin_memory = _digest, False
    data_loader.num_workers = min(data_loader.num_workers, 1)
    found: dict[int, list[int | None]] = {}
    try:
        with _generators_copied(dataset):
            drawn: Iterator[Any] = batches_of(data_loader, 0)
            next(drawn)  # the generators' state is known from here on
            enough = time.perf_counter() + _ENOUGH_S
            for place, first, second in zip(places, drawn, drawn, strict=False):
                pairs = zip_longest(first, second)
                found[place] = [one if one == other else None for one, other in pairs]
                if len(found) >= _LEAST_ITEMS and time.perf_counter() > enough:
                    break
        attributes = _of_attributes(dataset) if any(None in parts for parts in found.values()) else {}
        return {f"item {place} of the dataset": parts for place, parts in sorted(found.items())} | attributes
    except Exception as error:  # it comes again where the item is needed
        error.__traceback__ = None  # which would keep the worker
        return {}


def _digest(samples: list[Any]) -> list[int]:
    """Digest an item, as a DataLoader's `collate_fn`, and seed the generators for the next one."""
    digest = [*islice(_parts(samples), _MOST_PARTS)]
    seed_globally(0)
    return digest


def _parts(value: Any, depth: int = 0) -> Iterator[int]:
    """Yield a checksum of each part of a value. Of an object that has nothing in it, the type counts."""
    if isinstance(value, Tensor):
        numbers = value.detach().reshape(-1)
        value = numbers[:: len(numbers) // _MOST_VALUES + 1].cpu().contiguous().view(torch.uint8).numpy()
    elif hasattr(value, "__array__") or hasattr(value, "__array_interface__"):  # the latter of images
        flat = np.asarray(value).reshape(-1)
        value = flat[:: len(flat) // _MOST_VALUES + 1]
        value = [*value] if value.dtype.hasobject else value
    elif not isinstance(value, list | tuple | str | bytes | int | float | complex):
        value = [*(value if isinstance(value, Mapping) else held_by(value)).values()] or type(value).__name__
    if not isinstance(value, list | tuple):
        yield zlib.crc32(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    elif depth == _DEEPEST:
        yield 0
    else:
        for part in value:
            yield from _parts(part, depth + 1)


def _of_attributes(dataset: Any) -> Digests:
    found: Digests = {}
    for layer in _layers(dataset):
        for name in _ATTRIBUTES:
            values: Any = getattr(layer, name, None)
            if hasattr(values, "__len__"):
                kept = values[:: len(values) // _MOST_LISTED + 1]
                found.setdefault(f"{name} of the dataset", [zlib.crc32(repr([*_parts(kept)]).encode())])
    return found


def _layers(dataset: Any) -> Iterator[Any]:
    """Yield a dataset and those that it is made of, as a `Subset` is."""
    for _ in range(_DEEPEST):
        if dataset is not None:
            yield dataset
            dataset = getattr(dataset, "dataset", None)


@contextmanager
def _generators_copied(dataset: Any) -> Iterator[None]:
    """Have the dataset draw from copies of the random generators that it holds, so that these stay as they are."""
    held = [(held_by(layer), name, value) for layer in _layers(dataset) for name, value in held_by(layer).items()]
    kept = [(attributes, name, value) for attributes, name, value in held if isinstance(value, GENERATORS)]
    try:
        for attributes, name, value in kept:
            attributes[name] = copy.deepcopy(value)
        yield
    finally:
        for attributes, name, value in kept:
            attributes[name] = value

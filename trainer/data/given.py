"""A script's own DataLoader: what a loader is given to take its place."""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)

from trainer.data.base import OPTIONS, is_stream
from trainer.data.order import OwnOrder, generators_of
from trainer.errors import ConfigError


def arguments_from(loader: DataLoader[Any], *, ranks: int, training: bool, per_rank: bool) -> dict[str, Any]:
    """Return the arguments of `Run.loader` with which it takes the place of a DataLoader.

    Args:
        per_rank: whether the batch size is that of each rank. Otherwise it is that of all ranks together, so that these
            compute what one process computes; of an evaluation at least one for each.

    Raises:
        ConfigError: a batch of a training has fewer samples than there are ranks, or the class of the DataLoader draws
            batches in its own way.
    """
    if changed := _changed_methods(type(loader)):
        raise ConfigError(
            f"{type(loader).__name__} has a {changed} of its own, which a loader of all ranks would not call; divide "
            "its data by run.rank, and give run.backward samples=…"
        )
    arguments: dict[str, Any] = {"dataset": loader.dataset, "num_workers": loader.num_workers}
    for name in OPTIONS:
        value = getattr(loader, name)
        if value and value not in (default_collate, default_convert):
            arguments[name] = value
    sampler, batches = loader.sampler, loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:  # whole batches, each for one rank
        return arguments | {"batch_sampler": _own(loader, batches), "training": training}
    if batches is None:
        arguments["batch_size"] = None
    else:
        sampler, size = batches.sampler, batches.batch_size
        if not training and not per_rank:
            size = max(size, ranks)
        if not per_rank and size < ranks:
            raise ConfigError(
                f"the DataLoader's batch_size is {size}, which is the batch of all {ranks} ranks together; it must be "
                "at least 1 per rank, or give prepare per_rank=True"
            )
        arguments |= {"batch_size" if per_rank else "global_batch_size": size, "drop_last": batches.drop_last}
    arguments["training"] = training
    return arguments if is_stream(loader.dataset) else arguments | _order_from(loader, sampler)


def _order_from(loader: DataLoader[Any], sampler: Any) -> dict[str, Any]:
    """Return the argument for the order of the samples."""
    length = len(sampler) if hasattr(sampler, "__len__") else None
    is_whole = length == len(loader.dataset)  # type: ignore[arg-type]  # it is no stream
    if type(sampler) is SequentialSampler and is_whole:
        return {"shuffle": False}
    is_plain = type(sampler) is RandomSampler and not sampler.replacement and not generators_of(loader)
    return {"shuffle": True} if is_plain and is_whole else {"sampler": _own(loader, sampler)}


def _changed_methods(kind: type) -> str:
    """Return a method by which a subclass changes what a DataLoader yields; "" where there is none."""
    subclasses = kind.__mro__[: kind.__mro__.index(DataLoader)]
    own = {name for each in subclasses for name, value in vars(each).items() if callable(value)}
    return next(iter(sorted(own & {*vars(DataLoader)} - {"__init__", "__len__"})), "")


def _own(loader: DataLoader[Any], sampler: Any) -> Any:
    return OwnOrder(loader, sampler) if generators_of(loader) else sampler

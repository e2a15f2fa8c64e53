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
from trainer.data.order import OwnOrder, generators_in
from trainer.errors import ConfigError


def arguments_from(loader: DataLoader[Any], *, ranks: int, per_rank: bool) -> dict[str, Any]:
    """Return the arguments of `Run.loader` with which it takes the place of a DataLoader.

    Args:
        per_rank: whether the batch size is that of each rank. Otherwise it is that of all ranks together, so that these
            compute what one process computes.

    Raises:
        ConfigError: a batch has fewer samples than there are ranks.
    """
    arguments: dict[str, Any] = {"dataset": loader.dataset, "num_workers": loader.num_workers}
    for name in OPTIONS:
        value = getattr(loader, name)
        if value and value not in (default_collate, default_convert):
            arguments[name] = value
    sampler, batches = loader.sampler, loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:  # whole batches, each for one rank
        return arguments | {"batch_sampler": _own(loader, batches)}
    if batches is None:
        arguments["batch_size"] = None
    else:
        sampler, size = batches.sampler, batches.batch_size
        if not per_rank and size < ranks:
            raise ConfigError(
                f"the DataLoader's batch_size is {size}, which is the batch of all {ranks} ranks together; it must be "
                "at least 1 per rank, or give prepare per_rank=True"
            )
        arguments |= {"batch_size" if per_rank else "global_batch_size": size, "drop_last": batches.drop_last}
    return arguments if is_stream(loader.dataset) else arguments | _order_from(loader, sampler)


def _order_from(loader: DataLoader[Any], sampler: Any) -> dict[str, Any]:
    """Return the argument for the order of the samples."""
    is_whole = len(sampler) == len(loader.dataset)  # type: ignore[arg-type]  # it is no stream
    if type(sampler) is SequentialSampler and is_whole:
        return {"shuffle": False}
    is_plain = type(sampler) is RandomSampler and not sampler.replacement and not generators_in(sampler)
    return {"shuffle": True} if is_plain and is_whole else {"sampler": _own(loader, sampler)}


def _own(loader: DataLoader[Any], sampler: Any) -> Any:
    return OwnOrder(loader, sampler) if loader.generator is not None or generators_in(sampler) else sampler

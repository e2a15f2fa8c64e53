"""Consistency checks: ranks compare model, optimizer and settings, so that a difference is an error and not a hang."""

from __future__ import annotations

import hashlib
import math
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainer.cluster.gpus import SHARING_HINT, gpu_id, sharing_is_on
from trainer.cluster.output import print_line
from trainer.config import RunConfig
from trainer.data.base import Loader
from trainer.data.loader import ShardedLoader
from trainer.errors import ConfigError, TrainerError
from trainer.strategies.base import Strategy
from trainer.strategies.gradients import as_real


def check_consistency(strategy: Strategy, facts: Mapping[str, object]) -> None:
    """Compare `facts` with rank 0's. Collective; raises the same error on every rank.

    Raises:
        ConfigError: a rank has another value than rank 0; the text names the fact, both ranks, hosts and values.
    """
    if strategy.world.size == 1:
        return
    here = {name: str(fact) for name, fact in facts.items()}
    # Each rank receives what all of them send, and a model of many layers has many facts.
    if len(set(strategy.all_gather_object(_digest(here)))) == 1:
        return
    by_rank = strategy.all_gather_object((socket.gethostname(), here))
    root_host, expected = by_rank[0]
    for rank, (host, theirs) in enumerate(by_rank):
        for name in {**expected, **theirs}:
            if expected.get(name) != theirs.get(name):
                raise ConfigError(
                    f"ranks disagree about {name}: rank 0 on host {root_host} has {expected.get(name, 'none')}, "
                    f"rank {rank} on host {host} has {theirs.get(name, 'none')}; they must be the same everywhere"
                )


def warn_of_other_data(strategy: Strategy, loader: Loader) -> None:
    """Warn on rank 0 if some items of a loader's dataset are not the same on all ranks. Collective."""
    if strategy.world.size == 1:
        return
    by_rank = strategy.all_gather_object(loader.digests() if isinstance(loader, ShardedLoader) else {})
    for name in by_rank[0] if strategy.world.is_root else ():
        digests = [theirs.get(name) for theirs in by_rank]
        if None not in digests and (ranks := _differing_ranks(digests)) is not None:
            print_line(_OTHER_DATA.format(name, *sorted(ranks)), sys.stderr)
            return


_OTHER_DATA = (
    "trainer: WARNING: {} is not the same on ranks {} and {}: some samples are never seen, or a test's are trained on. "
    "Draw and split data with a seed (random_state=0) or before run.prepare, number labels in a sorted order, or take "
    "rank 0's by run.broadcast. If each rank is meant to have a part of its own, give run.loader already_sharded=True"
)


class PeriodicCheck:
    """Compares the ranks after their backward passes 0, 1, 2, 4, … 1024, 2048, 3072, …

    Ranks may diverge without an error: a rank skips a batch, takes another step, loads other weights, or steps a
    scheduler with its local loss; a bit of its memory flips. Compared are the loader's epoch and batches, the
    optimizers' settings, and a hash of each parameter's bits, which any single change of a weight changes.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.due_after: float = 0 if strategy.world.size > 1 else math.inf
        """The next comparison comes after the first backward pass whose number is above this."""
        self._has_warned = False

    def compare(
        self,
        passes: int,
        position: tuple[int, int, int] | None,
        optimizers: Mapping[int, Optimizer],
        models: Mapping[int, nn.Module],
    ) -> None:
        """Compare the ranks. Collective.

        Args:
            passes: the backward passes so far.
            position: the number of the loader whose batch is trained on, its epoch from 0, and the batch's number among
                those that the loader has yielded on this rank; None where there is no loader.
            optimizers: by numbers that are the same on all ranks; those that not every rank holds are left out.
            models: likewise; those whose weights are the same on all ranks.

        Raises:
            TrainerError: a rank has drawn other batches than another, or has other weights.
            ConfigError: a rank's optimizer has another learning rate or other settings.
        """
        self.due_after = min(max(2 * self.due_after, 1), self.due_after + _AT_LEAST_EVERY)
        facts_here = (socket.gethostname(), position, set(optimizers), set(models))
        by_rank = self._strategy.all_gather_object(facts_here)
        hosts, positions, held_optimizers, held_models = zip(*by_rank, strict=True)
        _check_positions(passes, hosts, positions)
        facts: dict[str, object] = {}
        for index, number in enumerate(sorted(set.intersection(*held_optimizers))):
            for name, value in describe_optimizer(optimizers[number]).items():
                facts[f"{name} (optimizer {index})" if index else name] = value
        check_consistency(self._strategy, facts)
        compared = [models[number] for number in sorted(set.intersection(*held_models))]
        _check_bits(self._strategy, _weights_of(compared), f"at backward pass {passes}")
        if compared and not self._has_warned:
            self._compare_buffers(compared)

    def _compare_buffers(self, models: Sequence[nn.Module]) -> None:
        """Warn once of a buffer that depends on each rank's samples, such as a codebook or a queue of features.

        Running statistics, which many models have, are left out: they are broadcast before an evaluation. So are
        buffers that some ranks have alone, or in another shape.
        """
        buffers = dict(_buffers_to_compare(models))
        kinds = [(name, tuple(buffer.shape)) for name, buffer in buffers.items()]
        here = dict(zip(kinds, _hashes([*buffers.values()]), strict=True))
        if len(set(self._strategy.all_gather_object(_digest(here)))) == 1:
            return
        by_rank = self._strategy.all_gather_object(here)
        for kind in here:
            hashes = [theirs.get(kind) for theirs in by_rank]
            if None not in hashes and (ranks := _differing_ranks(hashes)) is not None:
                self._has_warned = True
                if self._strategy.world.is_root:
                    print_line(_DIFFERING_BUFFER.format(kind[0], *ranks), sys.stderr)
                return


def _check_positions(passes: int, hosts: Sequence[str], positions: Sequence[tuple[int, int, int] | None]) -> None:
    if (ranks := _differing_ranks(positions)) is None:
        return
    names = _names(ranks, positions, hosts)
    where = [f"{name} {_describe_position(positions[rank])}" for name, rank in zip(names, ranks, strict=True)]
    raise TrainerError(
        f"ranks have drawn different batches for {passes} backward passes: {', '.join(where)}; one has "
        "skipped the backward pass of a batch (`continue`), or has begun a loader by itself. All ranks have to "
        "skip a batch together: ask run.all_reduce whether any does"
    )


def check_states(
    strategy: Strategy, models: Mapping[int, nn.Module], optimizers: Mapping[int, Optimizer], when: str
) -> None:
    """Compare the ranks' weights, and what PyTorch's own optimizers keep for them. Collective.

    Optimizers of others may keep what is each rank's own, such as the step to a neighbourhood's worst point.

    Args:
        models: by numbers that are the same on all ranks; those that not every rank holds are left out.
        optimizers: likewise.
        when: the moment, for the message.

    Raises:
        TrainerError: a rank has other weights, or another state of an optimizer.
    """
    held = set.intersection(*strategy.all_gather_object({*models, *optimizers}))
    named = _weights_of([models[number] for number in sorted(held & {*models})])
    for number in sorted(held & {*optimizers}):
        if type(optimizers[number]).__module__.startswith("torch.optim."):
            parameters = [each for group in optimizers[number].param_groups for each in group["params"]]
            for index, parameter in enumerate(parameters):
                for name, value in optimizers[number].state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        named.append((f"{name} of the optimizer's parameter {index}", value))
    _check_bits(strategy, named, when)


def _weights_of(models: Iterable[nn.Module]) -> list[tuple[str, Tensor]]:
    return [(name, parameter) for model in models for name, parameter in model.named_parameters()]


def _check_bits(strategy: Strategy, named: Sequence[tuple[str, Tensor]], when: str) -> None:
    """Raise `TrainerError` if tensors differ between ranks. Collective, unless there is none."""
    hashes = _hashes([tensor for _, tensor in named])
    if not named or (ranks := _differing_ranks(strategy.all_gather_object(_digest(hashes)))) is None:
        return
    hosts, by_rank = zip(*strategy.all_gather_object((socket.gethostname(), hashes)), strict=True)
    pairs = zip([name for name, _ in named], by_rank[ranks[0]], by_rank[ranks[1]], strict=False)
    first = next((name for name, theirs, usual in pairs if theirs != usual), "the number of parameters")
    other, same = _names(ranks, by_rank, hosts)
    raise TrainerError(
        f"the weights of {other} are not those of {same}, first in {first}, {when}: load and change weights on all "
        "ranks alike (noise from one seed, steps after run.backward, not in a gradient's hook), or before run.prepare, "
        "which gives all ranks rank 0's; if none were, memory or a device is faulty"
    )


_DIFFERING_BUFFER = (
    "trainer: WARNING: buffer {} is not the same on ranks {} and {}: each rank has changed it by its own samples, and "
    "rank 0's is saved. Have all ranks change it alike, with run.all_reduce, or call "
    "run.strategy.broadcast_buffers(model) after each step"
)


_RUNNING_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of BatchNorm and InstanceNorm."""


def _buffers_to_compare(models: Iterable[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield the models' buffers except running statistics."""
    for model in models:
        for name, buffer in model.named_buffers():
            if name.rpartition(".")[2] not in _RUNNING_STATISTICS and buffer.numel() and not is_lazy(buffer):
                yield name, buffer


_AT_LEAST_EVERY = 1024


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _describe_position(position: tuple[int, int, int] | None) -> str:
    if position is None:
        return "has drawn none of run.loader"
    loader, epoch, drawn = position
    return f"is at batch {drawn} of loader {loader}, in its epoch {epoch} (from 0)"


def _differing_ranks(values: Sequence[object]) -> tuple[int, int] | None:
    """Return the first rank whose value is not the most common, and the first rank whose value differs from that.

    In a tie rank 0's value counts as the most common. None if all are equal.
    """
    ((usual, _),) = Counter(values).most_common(1)
    other = next((rank for rank, value in enumerate(values) if value != usual), None)
    return None if other is None else (other, next(r for r, value in enumerate(values) if value != values[other]))


def _names(ranks: tuple[int, int], values: Sequence[object], hosts: Sequence[str]) -> tuple[str, str]:
    """Return the names of two ranks that differ; with both hosts where no majority says which of them is wrong.

    `trainer run` goes by this: a host that an error names alone is to blame.
    """
    other, same = (f"rank {rank} on host {hosts[rank]}" for rank in ranks)
    counts = sorted(Counter(map(repr, values)).values())
    return (other, same) if counts[-1] == counts[-2] else (other, f"rank {ranks[1]}")


@torch.no_grad()
def _hashes(tensors: Sequence[Tensor]) -> list[int]:
    """Return a hash of each tensor's bits and their places."""
    if not tensors:
        return []
    found = [_hash_of_bits(as_real(tensor)) for tensor in tensors]
    hashes: list[int] = torch.stack([each.to(found[0].device) for each in found]).tolist()
    return hashes


def _hash_of_bits(tensor: Tensor) -> Tensor:
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    raw = raw.clone() if raw.storage_offset() % 8 else raw
    whole = raw.numel() // 8 * 8  # eight bytes at a time
    return _hash(torch.stack([_hash(raw[:whole].view(torch.int64)), _hash(raw[whole:].long())]))


def _hash(numbers: Tensor) -> Tensor:
    """Return the sum of the numbers, modulo 2^64, each times the factor of its place; of many, that of such sums."""
    factors = _factors(numbers.device)
    if len(numbers) > len(factors):
        numbers = torch.stack([_hash(part) for part in numbers.split(len(factors))])
    factors = factors[: len(numbers)]
    return numbers.dot(factors) if numbers.device.type == "cpu" else (numbers * factors).sum()


@cache
def _factors(device: torch.device) -> Tensor:
    """Return odd numbers, so that a product with any of them tells what was multiplied."""
    drawn = np.random.SeedSequence(0).generate_state(2**18, np.uint64) | np.uint64(1)
    return torch.from_numpy(drawn.view(np.int64)).to(device)


def check_devices(strategy: Strategy) -> None:
    """Find ranks that share a GPU without having been allowed to, which NCCL reports as an internal error. Collective.

    Raises:
        ConfigError: two ranks share a GPU.
    """
    device = (socket.gethostname(), gpu_id(strategy.world.device), sharing_is_on())
    owners: dict[str, tuple[int, bool]] = {}
    for rank, (host, gpu, may_share) in enumerate(strategy.all_gather_object(device)):
        if gpu is None:
            continue
        other, other_may = owners.setdefault(gpu, (rank, may_share))
        if other != rank and not (may_share and other_may):
            raise ConfigError(
                f"ranks {other} and {rank} share one GPU of host {host}; start at most as many ranks there as it has "
                f"GPUs; {SHARING_HINT}"
            )


def describe_settings(config: RunConfig) -> dict[str, object]:
    """Return the settings that must be the same on all ranks."""
    private = ("log_every_s", "num_workers")
    return {f"setting {name}": value for name, value in config.as_dict().items() if name not in private}


def describe_model(model: nn.Module) -> dict[str, object]:
    """Describe every parameter and buffer by its type and shape, and parameters by their order of memory.

    Raises:
        ConfigError: a lazy module has parameters without a shape, which they get in its first forward pass.
    """
    facts: dict[str, object] = {}
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            if is_lazy(tensor):
                raise ConfigError(
                    f"{kind} {name} is of a lazy module and has no shape yet; run one forward pass on a sample input "
                    "before the model is prepared"
                )
            fact = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            if kind == "parameter":
                fact += _describe_order(tensor) + ("" if tensor.requires_grad else ", frozen")
            facts[f"{kind} {name}"] = fact
    return facts


def _describe_order(tensor: Tensor) -> str:
    if tensor.is_contiguous():
        return ""
    # The stride of a dimension of length 1 has no meaning, and depends on how the tensor was made.
    strides = [stride if length > 1 else 1 for length, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return f", strides {strides}"


def describe_optimizer(optimizer: Optimizer) -> dict[str, object]:
    """Describe the optimizer's class and each group's settings, without the parameters themselves."""
    facts: dict[str, object] = {"the optimizer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        facts[f"the number of parameters in the optimizer's group {number}"] = len(group["params"])
        for name, value in group.items():
            if name != "params":
                facts[f"{name} of the optimizer's group {number}"] = _described(value)
    return facts


def is_plain(value: object) -> bool:
    """Return whether a setting consists of numbers and strings only."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _described(value: object) -> object:
    """Return what is compared of a setting: the values of a tensor, without its device; the type of other objects."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_described(item) for item in value]
    return value if is_plain(value) else type(value).__name__

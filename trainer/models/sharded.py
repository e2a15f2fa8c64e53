"""Gather and shard DTensors, of which each rank holds a part. Imports torch.distributed only when it is needed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.errors import ConfigError, TrainerError

TensorPath = tuple[Any, ...]
"""The keys and indices that lead from the outermost container to a value."""


@dataclass(frozen=True)
class Part:
    """A box of a tensor's values."""

    offset: tuple[int, ...]
    """Index of the box's first value in the whole tensor."""
    values: Tensor


@dataclass(frozen=True)
class Scattered:
    """A tensor whose values lie in parts, such as files that are mapped into memory. Reading returns copies."""

    shape: torch.Size
    dtype: torch.dtype
    parts: Sequence[Part]

    def whole(self) -> Tensor:
        """Return all values, on the CPU."""
        if len(self.parts) == 1 and self.parts[0].values.shape == self.shape:
            return self.parts[0].values.clone()  # in the same memory format
        return self.read((0,) * len(self.shape), self.shape)

    def read(self, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return the values of a box, on the CPU; no others are read."""
        box = torch.empty(tuple(shape), dtype=self.dtype)
        for part in self.parts:
            first = tuple(map(max, offset, part.offset))
            behind = tuple(
                min(start + length, part_start + part_length)
                for start, length, part_start, part_length in zip(
                    offset, shape, part.offset, part.values.shape, strict=True
                )
            )
            if all(start < end for start, end in zip(first, behind, strict=True)):
                box[_slices(first, behind, offset)] = part.values[_slices(first, behind, part.offset)]
        return box


def _slices(first: Sequence[int], behind: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(begin - zero, end - zero) for begin, end, zero in zip(first, behind, origin, strict=True))


def is_sharded(value: object) -> bool:
    """Return whether a value is a tensor of which each rank holds a part."""
    return hasattr(value, "full_tensor")  # without the import, which no other strategy needs


def gather(value: Tensor) -> Tensor:
    """Return the whole of a sharded tensor, on its device; other values as they are. Collective if sharded."""
    sharded: Any = value
    whole: Tensor = sharded.full_tensor() if is_sharded(value) else value
    return whole


def local_part(value: Tensor) -> Part | None:
    """Return this rank's part of a sharded tensor; None where it is empty, or a lower rank has the same part."""
    sharded: Any = value
    mesh = zip(sharded.placements, sharded.device_mesh.get_coordinate(), strict=True)
    local: Tensor = sharded.to_local()
    if not local.numel() or any(placement.is_replicate() and coordinate for placement, coordinate in mesh):
        return None
    offset, _ = _local_box(sharded)
    return Part(offset, local)


def _local_box(sharded: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offset and the shape of this rank's part: each dimension of the mesh cuts as torch.chunk does."""
    offset, shape = [0] * sharded.dim(), [*sharded.shape]
    mesh = sharded.device_mesh
    for placement, ranks, rank in zip(sharded.placements, mesh.shape, mesh.get_coordinate(), strict=True):
        if not placement.is_replicate():
            if not placement.is_shard():  # a strided shard is no box: tensor parallelism beneath fully_shard
                raise ConfigError(f"a tensor is placed as {placement}; valid for checkpoints are Shard and Replicate")
            length = -(-shape[placement.dim] // ranks)
            begin = min(rank * length, shape[placement.dim])
            offset[placement.dim] += begin
            shape[placement.dim] = min(length, shape[placement.dim] - begin)
    return tuple(offset), tuple(shape)


def take_part(state: Any) -> None:
    """Take part in other ranks' `gather` of every sharded tensor in nested containers. Collective."""
    if isinstance(state, Tensor):
        gather(state)
    elif isinstance(state, Mapping | list | tuple):
        for part in state.values() if isinstance(state, Mapping) else state:
            take_part(part)


def whole_state(model: nn.Module, *, keep: bool) -> dict[str, Any]:
    """Return a model's whole `state_dict` in host memory, or {} if not `keep`. Collective if sharded."""
    state = model.state_dict()
    if not keep:
        take_part(state)
        return {}
    return {
        name: gather(value).to("cpu", copy=True) if isinstance(value, Tensor) else value
        for name, value in state.items()
    }


def shard_like(whole: Tensor | Scattered, like: Any) -> Any:
    """Return this rank's part of a tensor that every rank can read, sharded and placed as `like` is. Sends nothing."""
    from torch.distributed.tensor import DTensor

    if isinstance(whole, Tensor):
        whole = Scattered(whole.shape, whole.dtype, [Part((0,) * whole.dim(), whole.detach())])
    local = whole.read(*_local_box(like)).to(like.device)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def shard_as(whole: Any, like: Any) -> Any:
    """Return nested containers with each tensor sharded as its counterpart in `like`, or whole if there is none."""
    if is_sharded(like) and isinstance(whole, Tensor | Scattered) and not is_sharded(whole):
        return shard_like(whole, like)
    if isinstance(whole, Scattered):
        return whole.whole()
    if isinstance(whole, dict):
        result = copy.copy(whole)  # not a new dict: a module's state has the versions of its modules as an attribute
        by_name: Mapping[Any, Any] = like if isinstance(like, Mapping) else {}
        result.update((name, shard_as(value, by_name.get(name))) for name, value in whole.items())
        return result
    if isinstance(whole, list | tuple):
        has_same = isinstance(like, list | tuple) and len(whole) == len(like)
        return type(whole)(shard_as(*pair) for pair in zip(whole, like if has_same else repeat(None)))  # noqa: B905
    return whole


def shard_optimizer_state(whole: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return a state for an optimizer's `load_state_dict`, with tensors sharded like their parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in whole["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, parameters, strict=True))
    state = {number: shard_values(values, by_number[number]) for number, values in whole["state"].items()}
    return {**shard_as({name: value for name, value in whole.items() if name != "state"}, None), "state": state}


def shard_values(values: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return an optimizer's state of a parameter, with tensors of the parameter's shape sharded like the parameter."""
    result = {}
    for name, value in values.items():
        is_like = isinstance(value, Tensor | Scattered) and len(value.shape) and value.shape == parameter.shape
        result[name] = shard_as(value, parameter if is_like else None)
    return result


class _Held(nn.Parameter):
    """A whole parameter that somebody still holds: what is done with it is done with the sharded one in its place."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*current(args), **{name: current(value) for name, value in (kwargs or {}).items()})
        if getattr(result, "grad_fn", None) is not None and function is not Tensor.clone:  # which averages begin with
            _refuse(next((vars(value)["path"] for value in args if isinstance(value, cls)), "a parameter"))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(current(self), name)  # what only a sharded tensor has


def replace_parameter(parameter: nn.Parameter, sharded: nn.Parameter, path: str) -> None:
    """Free the memory of a parameter that a sharded one has replaced, and have its holders work with that."""
    if parameter.requires_grad:
        parameter.register_hook(partial(_refuse, path))  # of a loss that was computed before
    parameter.data = parameter.data.new_empty(0)
    vars(parameter).update(sharded=sharded, path=path)
    parameter.__class__ = _Held


def current(value: Any) -> Any:
    """Return a parameter, or a list of values, with the sharded ones in place of parameters that were replaced."""
    if isinstance(value, list | tuple):
        return [*map(current, value)]
    return vars(value)["sharded"] if isinstance(value, _Held) else value


def _refuse(name: str, *_: object) -> None:
    raise TrainerError(
        f"the loss holds {name} as it was before run.prepare, which has sharded it since; take model.parameters() anew"
    )

"""Sharded tensors: DTensors, of which each rank holds a part, beside plain tensors. Imports torch.distributed late."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


def is_sharded(value: object) -> bool:
    """Return whether a value is a tensor of which each rank holds a part."""
    return hasattr(value, "full_tensor")  # without the import, which no other strategy needs


def gather(value: Tensor) -> Tensor:
    """Return the whole of a sharded tensor, on its device; anything else as it is. Collective for a sharded one."""
    sharded: Any = value
    whole: Tensor = sharded.full_tensor() if is_sharded(value) else value
    return whole


def take_part(state: Any) -> None:
    """Take part in other ranks' `gather` of every sharded tensor in nested containers, in their order. Collective."""
    if is_sharded(state):
        gather(state)
    elif isinstance(state, Mapping):
        for value in state.values():
            take_part(value)
    elif isinstance(state, list | tuple):
        for value in state:
            take_part(value)


def whole_state(model: nn.Module, *, keep: bool) -> dict[str, Any]:
    """Return a model's whole `state_dict` in host memory, {} where it is not to be kept. Collective if sharded."""
    state = model.state_dict()
    if not keep:
        take_part(state)
        return {}
    return {name: gather(one).to("cpu", copy=True) if isinstance(one, Tensor) else one for name, one in state.items()}


def shard_like(whole: Tensor, like: Any) -> Any:
    """Return this rank's part of a tensor that every rank has whole, sharded and placed as `like` is. No exchange."""
    from torch.distributed.tensor import distribute_tensor

    on_device = whole.detach().to(like.device)
    return distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None)


def shard_as(whole: Any, own: Any) -> Any:
    """Return nested containers with each tensor sharded as the one in its place in `own`, where that is sharded."""
    if is_sharded(own) and isinstance(whole, Tensor) and not is_sharded(whole):
        return shard_like(whole, own)
    if isinstance(whole, dict) and isinstance(own, Mapping):
        result = copy.copy(whole)  # not a new dict: a module's state has the versions of its modules as an attribute
        result.update((name, shard_as(value, own.get(name))) for name, value in whole.items())
        return result
    if isinstance(whole, list | tuple) and isinstance(own, list | tuple) and len(whole) == len(own):
        return type(whole)(shard_as(*pair) for pair in zip(whole, own, strict=True))
    return whole


def shard_optimizer_state(whole: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state for its `load_state_dict`: what has a parameter's shape is sharded as that is."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(map(is_sharded, parameters)):
        return whole
    numbers = [number for group in whole["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, parameters, strict=True))
    state = {number: shard_values(values, by_number[number]) for number, values in whole["state"].items()}
    return {**whole, "state": state}


def shard_values(values: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return an optimizer's state of one parameter, with what has the parameter's shape sharded as it is."""
    return {
        name: shard_like(value, parameter)
        if is_sharded(parameter) and isinstance(value, Tensor) and value.shape == parameter.shape and value.dim()
        else value
        for name, value in values.items()
    }

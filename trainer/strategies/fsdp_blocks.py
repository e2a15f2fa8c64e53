"""Blocks: which modules of a model strategy "fsdp" gathers one at a time, and what it cannot shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.config import FsdpConfig
from trainer.errors import ConfigError
from trainer.strategies.base import check_dense

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module, names: str | tuple[str, ...]) -> list[nn.Module]:
    """Return the blocks of a model, in the model's order; none of them is part of another one.

    Args:
        names: see `FsdpConfig.blocks`.

    Raises:
        ConfigError: no module has a class of that name, or its class is called by nobody.
    """
    if names == "auto":
        return _repeated(model)
    blocks: list[nn.Module] = []
    _collect(model, frozenset(names), blocks)
    valid = {type(one).__name__ for one in model.modules() if one is not model}
    if missing := sorted(set(names) - valid):
        raise ConfigError(
            f"fsdp's blocks has {missing[0]!r}; valid are the model's classes, {', '.join(sorted(valid))}"
        )
    for block in blocks:
        if isinstance(block, nn.ModuleList | nn.ModuleDict):
            raise ConfigError(f"fsdp's blocks has {type(block).__name__!r}, which has no forward; name what it holds")
    return blocks


def _collect(module: nn.Module, names: frozenset[str], blocks: list[nn.Module]) -> None:
    for child in module.children():
        if type(child).__name__ in names:
            blocks += [child] if child not in blocks else []
        else:
            _collect(child, names, blocks)


def _repeated(module: nn.Module) -> list[nn.Module]:
    """Return those children of containers that have a sibling of their class, and parameters."""
    children = list(module.children())
    kinds = Counter(type(child) for child in children if _has_parameters(child) and not isinstance(child, _CONTAINERS))
    blocks: list[nn.Module] = []
    for child in children:
        if isinstance(module, _CONTAINERS) and kinds[type(child)] > 1:
            blocks.append(child)
        else:
            blocks += [one for one in _repeated(child) if one not in blocks]
    return blocks


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def check_model(model: nn.Module, blocks: Sequence[nn.Module], config: FsdpConfig) -> None:
    """Raise `ConfigError` for a model that cannot be sharded, or cannot be with these settings."""
    check_dense(model, "strategy 'fsdp' exchanges")
    if config.checkpoint_activations:
        if not blocks:
            raise ConfigError("fsdp's checkpoint_activations computes blocks again, and there are none; name blocks")
        if any(isinstance(one, _BatchNorm) for block in blocks for one in block.modules()):
            raise ConfigError(
                "fsdp's checkpoint_activations computes blocks again, and a BatchNorm in one would count each batch "
                "twice; leave it out, or name blocks without BatchNorm"
            )
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise ConfigError(f"parameter {name} is a scalar, which strategy 'fsdp' cannot shard; give it shape (1,)")
        if not parameter.is_contiguous():
            raise ConfigError(
                f"parameter {name} is not contiguous, and strategy 'fsdp' cuts rows; leave out to(memory_format=…) and "
                "take channels_last of the batches"
            )
        if parameter.is_meta:
            raise ConfigError(f"parameter {name} is on the meta device, and has no values; make the model on the CPU")
    _check_groups(model, blocks)


def _check_groups(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Check that each parameter is of one group, a block or the rest, and that a group's have one type."""
    owner: dict[nn.Parameter, str] = {}
    names = {module: name for name, module in model.named_modules()}
    groups = [(names[block], block.modules()) for block in blocks]
    for group, modules in (*groups, ("the rest of the model", _outside(model, frozenset(blocks)))):
        kinds = set()
        for module in modules:
            for name, parameter in module.named_parameters(recurse=False):
                if owner.setdefault(parameter, group) != group:
                    raise ConfigError(
                        f"parameter {name} of {group} is one of {owner[parameter]} as well, and both are gathered at "
                        "different times; name other blocks, or blocks=() for one group"
                    )
                kinds.add(str(parameter.dtype).removeprefix("torch."))
        if len(kinds) > 1:
            raise ConfigError(f"parameters of {group} are {' and '.join(sorted(kinds))}; a block's have one type")


def _outside(module: nn.Module, blocks: frozenset[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules that are reached without a block, also those that are part of one elsewhere."""
    yield module
    for child in module.children():
        if child not in blocks:
            yield from _outside(child, blocks)

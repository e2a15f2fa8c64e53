"""Differences between a script and the checkpoint that it goes on from: models, optimizers, settings, other state.

The checkpoint's settings count, as in PyTorch; only the learning rate that `Trainer` computes is the script's. A
checkpoint keeps settings as they were in the script, because schedulers change an optimizer's learning rate and
momentum. Compared with those of the script that goes on, they tell what was edited.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer.loop.consistency import is_plain
from trainer.models.sharded import Scattered

_RATE = "lr"
_LEFT_OUT = ("params", "param_names", "initial_lr", _RATE)
# The optimizer's rates are told as such. A function's attributes may be anything.
_LEFT_OUT_OF_SCHEDULERS = ("base_lrs", "lr_lambdas")


def settings_of(optimizers: Iterable[Optimizer], objects: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of optimizers and schedulers as text, by the names that warnings give them."""
    settings: dict[str, str] = {}
    for number, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            where = f" of group {place}" * (len(optimizer.param_groups) > 1) + f" of optimizer {number}" * (number > 0)
            # A scheduler that has been made has set its first learning rate.
            settings |= _texts({_RATE: group.get("initial_lr", group["lr"])}, where)
            settings |= _texts({name: value for name, value in group.items() if name not in _LEFT_OUT}, where)
    for name, value in objects.items():
        for number, scheduler in enumerate(_flat(value)):
            where = f" of state {name!r}" + f", its scheduler {number}" * (number > 0)
            values = vars(scheduler)
            public = [name for name in values if not name.startswith("_") and name not in _LEFT_OUT_OF_SCHEDULERS]
            settings |= _texts({name: values[name] for name in public}, where)
    return settings


def merge_settings(
    here: Mapping[str, str], there: Mapping[str, str], *, rate_is_scripts: bool
) -> tuple[dict[str, str], str]:
    """Return the settings that count, and in one line which of a script differ from a checkpoint's; "" if none does.

    Args:
        here: the script's.
        there: the checkpoint's.
        rate_is_scripts: the script's learning rate counts. Everything else is the checkpoint's, as in PyTorch.
    """
    merged, parts = dict(here), []
    for name, value in here.items():
        if (saved := there.get(name, value)) == value:
            continue
        if rate_is_scripts and name.split(" ", 1)[0] == _RATE:
            parts.append(f"{name} = {value} from the script (checkpoint: {saved})")
        else:
            merged[name] = saved
            parts.append(f"{name} = {saved} from the checkpoint (script: {value})")
    return merged, f"what counts: {', '.join(parts)}; see docs/surviving.md, Going on" if parts else ""


def class_of(value: Any) -> str:
    """Return a state object's class, and those of schedulers within it: each loads the state of any other."""
    inner = " and ".join(map(class_of, _inner(value)))
    return f"{type(value).__name__} of {inner}" if inner else type(value).__name__


def model_differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """Return in words how a model's state differs from a checkpoint's in names, shapes and types."""
    problems = []
    if missing := [name for name in here if name not in there]:
        problems.append(f"it lacks {_first(missing)}")
    if unknown := [name for name in there if name not in here]:
        problems.append(f"it has {_first(unknown)}, which the model does not have")
    for name, value in here.items():
        saved = there.get(name)
        if not isinstance(value, Tensor) or not isinstance(saved, Tensor | Scattered):
            continue
        if value.shape != saved.shape:
            problems.append(f"{name} has shape {tuple(saved.shape)} there and {tuple(value.shape)} here")
        elif value.dtype != saved.dtype:
            problems.append(f"{name} is {saved.dtype} there and {value.dtype} here")
    return problems


def optimizer_differences(optimizer: Optimizer, saved: Mapping[str, Any]) -> list[str]:
    """Return in words how an optimizer differs from a checkpoint's in class and number of parameters."""
    if (name := type(optimizer).__name__) != saved["class"]:
        return [f"is a {saved['class']} there and a {name} here"]
    here, there = (
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, saved["state"]["param_groups"])
    )
    return [f"has {there} parameters per group there and {here} here"] if here != there else []


def _inner(value: Any) -> Sequence[Any]:
    """Return the schedulers that a scheduler consists of, as a SequentialLR does."""
    return getattr(value, "_schedulers", ()) if isinstance(value, LRScheduler) else ()


def _flat(value: Any) -> Iterator[LRScheduler]:
    if isinstance(value, LRScheduler):
        yield value
    for inner in _inner(value):
        yield from _flat(inner)


def _texts(values: Mapping[str, Any], where: str) -> dict[str, str]:
    texts = {}
    for name, value in values.items():
        plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if is_plain(plain) or isinstance(plain, Counter):
            # A tensor's rate is one in single precision.
            texts[f"{name}{where}"] = f"{plain:.7g}" if isinstance(plain, float) else repr(plain)
    return texts


def _first(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]

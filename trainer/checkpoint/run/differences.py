"""Differences between a script and the checkpoint that it goes on from: models, optimizers, and other state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from trainer.loop.consistency import is_plain
from trainer.models.sharded import Scattered

# Schedulers change the last of them while they train.
_NOT_THE_SCRIPTS = ("params", "param_names", "lr", "initial_lr", "momentum", "betas", "max_lr", "min_lr")


def settings_from(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings that an optimizer's state has from a checkpoint, and otherwise from the script."""
    for number, (saved, group) in enumerate(zip(there["param_groups"], here["param_groups"], strict=True)):
        where = f" of group {number}" * (len(here["param_groups"]) > 1)
        # A scheduler that has been made has set its first learning rate.
        names = ["initial_lr" if "initial_lr" in group else "lr", *sorted(set(group) - set(_NOT_THE_SCRIPTS))]
        for name in names:
            if is_plain(group[name]) and is_plain(saved.get(name)) and saved.get(name, group[name]) != group[name]:
                yield f"{name.removeprefix('initial_')}{where} = {saved[name]} (script: {group[name]})"


def class_of(value: Any) -> str:
    """Return a state object's class, and those of schedulers within it: each loads the state of any other."""
    inner = " and ".join(map(class_of, getattr(value, "_schedulers", ()) if isinstance(value, LRScheduler) else ()))
    return f"{type(value).__name__} of {inner}" if inner else type(value).__name__


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """Return in words what keeps a checkpoint's contents from being loaded, compared with those of a run."""
    problems: list[str] = []
    for kind, find in (("models", _model_differences), ("optimizers", _optimizer_differences)):
        if len(here[kind]) != len(there[kind]):
            problems.append(f"it has {len(there[kind])} {kind}, and {len(here[kind])} were prepared")
        for number, pair in enumerate(zip(here[kind], there[kind], strict=False)):
            where = f" ({kind[:-1]} {number})" * (len(here[kind]) > 1)
            problems += [problem + where for problem in find(*pair)]
    for name in sorted(set(here["objects"]) ^ set(there["objects"])):
        problems.append(f"it has {'no' if name in here['objects'] else 'a'} state {name!r}")
    for name in sorted(set(here["kinds"]) & set(there["kinds"])):
        mine, its = here["kinds"][name]["class"], there["kinds"][name]["class"]
        if mine != its:
            problems.append(f"state {name!r} is a {its} there and a {mine} here")
    return problems


def _model_differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> Iterator[str]:
    if missing := [name for name in here if name not in there]:
        yield f"it lacks {_first(missing)}"
    if unknown := [name for name in there if name not in here]:
        yield f"it has {_first(unknown)}, which the model does not have"
    for name, value in here.items():
        saved = there.get(name)
        if not isinstance(value, Tensor) or not isinstance(saved, Tensor | Scattered):
            continue
        if value.shape != saved.shape:
            yield f"{name} has shape {tuple(saved.shape)} there and {tuple(value.shape)} here"
        elif value.dtype != saved.dtype:
            yield f"{name} is {saved.dtype} there and {value.dtype} here"


def _optimizer_differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> Iterator[str]:
    groups, others = ([len(group["params"]) for group in one["state"]["param_groups"]] for one in (here, there))
    if here["class"] != there["class"]:
        yield f"the optimizer is a {there['class']} there and a {here['class']} here"
    elif groups != others:
        yield f"the optimizer has {others} parameters per group there and {groups} here"


def _first(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]

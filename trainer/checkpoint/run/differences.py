"""Differences between a script and the checkpoint that it goes on from: models, optimizers, settings, other state.

A checkpoint keeps settings as they were in the script, because schedulers change an optimizer's learning rate and
momentum, and many a state is empty until it is used. Compared with those of the script that goes on, they tell what was
edited.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, PolynomialLR

from trainer.loop.consistency import is_plain
from trainer.loop.lr_schedule import MORE_STEPS
from trainer.models.sharded import Scattered, tensors_in

_RATE = "lr"
_LEFT_OUT = ("params", "param_names", "initial_lr", _RATE)
# The optimizer's rates are told as such. A function's attributes may be anything.
_LEFT_OUT_OF_SCHEDULERS = ("base_lrs", "lr_lambdas")
# What has another course after its last step than before, by the setting that says how many there are.
_ENDS: tuple[tuple[type[LRScheduler], str, str], ...] = (
    (CosineAnnealingLR, "T_max", "the learning rate rises again"),
    (OneCycleLR, "total_steps", "the next one is an error"),
    (PolynomialLR, "total_iters", "the learning rate stays 0"),
)


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
    merged, parts, advice = {}, [], ""
    for name, value in here.items():
        saved = there.get(name, value)
        is_scripts = rate_is_scripts and name.split(" ", 1)[0] == _RATE
        merged[name] = value if is_scripts else saved
        if saved == value:
            continue
        if is_scripts:
            parts.append(f"{name} = {value} from the script (checkpoint: {saved})")
        else:
            parts.append(f"{name} = {saved} from the checkpoint (script: {value})")
            advice = "; to change what is the checkpoint's, see docs/surviving.md, Going on"
    return merged, f"what counts: {', '.join(parts)}{advice}" if parts else ""


def describe_ends(objects: Mapping[str, Any]) -> Iterator[str]:
    """Yield what becomes of each scheduler that has taken all steps that it was made for, and is to take more."""
    for name, value in objects.items():
        for scheduler, (kind, steps, follows) in product(_flat(value), _ENDS):
            if isinstance(scheduler, kind) and scheduler.last_epoch >= (end := getattr(scheduler, steps)):
                yield f"state {name!r} has taken all {end} steps of its {kind.__name__} ({steps}), and {follows}"


def explain(error: BaseException) -> str:
    """Return in one line why a scheduler's step has failed; "" for any other error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    scheduler = trace.tb_frame.f_locals.get("self") if trace is not None else None
    if not isinstance(error, ValueError) or not isinstance(scheduler, OneCycleLR):
        return ""
    steps = f"OneCycleLR was made for {scheduler.total_steps} steps (total_steps)"
    return f"{steps}, and step {scheduler.last_epoch} is asked for; {MORE_STEPS}"


def kind_of(value: Any) -> dict[str, Any]:
    """Return what a state object is: its class, the names in its state, and the shapes of the tensors there."""
    state = {} if type(value) is dict else value.state_dict()  # a dict's names are data
    if not isinstance(state, Mapping):
        state = {}
    # Private values come and go with PyTorch's versions.
    names = [str(name) for name, part in state.items() if isinstance(part, Tensor) or not str(name).startswith("_")]
    shapes = {".".join(map(str, path)): list(tensor.shape) for path, tensor in tensors_in(state)}
    return {"class": _class_of(value), "names": names, "shapes": shapes}


def kind_differences(name: str, here: Mapping[str, Any], there: Mapping[str, Any]) -> Iterator[str]:
    """Yield how a state object differs from what a checkpoint's was made of, in words."""
    if here["class"] != there["class"]:
        yield f"state {name!r} is a {there['class']} there and a {here['class']} here"
        return
    what = f"state {name!r}, a {here['class']}"
    yield from (f"{what}, has {key!r} there and not here" for key in there["names"] if key not in here["names"])
    yield from (f"{what}, has {key!r} here and not there" for key in here["names"] if key not in there["names"])
    for key, shape in here["shapes"].items():
        if (saved := there["shapes"].get(key, shape)) != shape:
            yield f"{key} of {what}, has shape {tuple(saved)} there and {tuple(shape)} here"


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


def _class_of(value: Any) -> str:
    inner = " and ".join(map(_class_of, _inner(value)))
    return f"{type(value).__name__} of {inner}" if inner else type(value).__name__


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

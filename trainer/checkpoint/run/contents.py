"""Contents of a checkpoint: what is kept of a run, and how it is compared and given back."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from trainer.checkpoint.disk.committed import Committed
from trainer.checkpoint.disk.state_files import read_state
from trainer.cluster.output import print_line
from trainer.data.shard_plan import mix_seeds
from trainer.errors import ConfigError
from trainer.loop.consistency import is_plain
from trainer.loop.lr_schedule import LearningRate, UsersSchedule
from trainer.loop.prepared import Prepared
from trainer.models.memory_format import align_state
from trainer.models.sharded import Scattered, shard_as, shard_optimizer_state
from trainer.strategies.base import Strategy

# Schedulers change the last of them while they train.
_NOT_THE_SCRIPTS = ("params", "param_names", "lr", "initial_lr", "momentum", "betas", "max_lr", "min_lr")


@dataclass
class Resumed:
    """Where an interrupted run stopped."""

    checkpoint: Committed
    epoch: int
    """Number of the epoch in which it goes on, from 0."""
    updates: int
    positions: Sequence[Mapping[str, Any]]
    """The loaders' positions, in the order in which the loaders were made."""
    saved_in: int | None
    """The loader in whose pass it was saved; None between two epochs."""
    random: Mapping[str, Any] | None
    """This rank's random state; None on another number of ranks, and once it was restored."""


class Contents:
    """What a checkpoint keeps beside the position.

    The weights and the optimizers' state are the same on all ranks. Of BatchNorm's running statistics, which are each
    rank's own, those of the rank that writes are kept.

    Args:
        prepared: models and optimizers; what is prepared later counts as well.
        objects: the user's: with `state_dict` and `load_state_dict`, or dicts of plain data.
    """

    def __init__(self, prepared: Prepared, objects: Mapping[str, Any]) -> None:
        self.prepared, self.objects = prepared, objects
        if not self.prepared.models:
            raise ConfigError("nothing was prepared yet; call run.prepare before run.checkpoints")
        # What is saved stays until the last checkpoint is, also where a script lets go of it before.
        self._held: list[object] = [*self.prepared.models, *self.prepared.optimizers]
        for name, value in self.objects.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")) and type(value) is not dict:
                raise ConfigError(
                    f"state {name!r} is a {type(value).__name__}; valid are a dict, and objects with state_dict and "
                    "load_state_dict"
                )
            if any(value is held for held in self._held):
                raise ConfigError(f"state {name!r} was prepared, and is kept by itself; leave it out")

    @property
    def lacks_schedule(self) -> bool:
        """Whether a scheduler of torch's sets a learning rate, and no object in `state` is, or has, it."""
        kinds = LearningRate | UsersSchedule
        if any(isinstance(value, kinds) or hasattr(value, "optimizer") for value in self.objects.values()):
            return False
        # PyTorch marks an optimizer's step when a scheduler is made for it.
        return any(hasattr(optimizer.step, "_wrapped_by_lr_sched") for optimizer in self.prepared.optimizers)

    def state(self) -> dict[str, Any]:
        """Return everything, with the live tensors. Every rank calls it: an object's `state_dict` may be collective."""
        models, optimizers = self.prepared.models, self.prepared.optimizers
        self._held = [*models, *optimizers]
        for synchronizer in models.values():
            synchronizer.average_weights(optimizers)
        return self._state()

    def _state(self) -> dict[str, Any]:
        models, optimizers = self.prepared.models, self.prepared.optimizers
        return {
            "models": [model.state_dict() for model in models],
            "optimizers": [
                {"class": type(optimizer).__name__, "state": optimizer.state_dict()} for optimizer in optimizers
            ],
            "synchronizers": [synchronizer.state_dict() for synchronizer in models.values()],
            "objects": {
                name: value if type(value) is dict else value.state_dict() for name, value in self.objects.items()
            },
            "kinds": {name: {"class": _class_of(value)} for name, value in self.objects.items()},
        }

    def resume(self, checkpoint: Committed, strategy: Strategy) -> Resumed:
        """Take over a checkpoint, on every rank; say so on rank 0, and which settings are not those of the script.

        Raises:
            ConfigError: it does not fit the run; nothing was changed.
            TrainerError: it cannot be loaded.
        """
        saved = read_state(checkpoint.path, is_mapped=strategy.shards)
        here = self._state()
        if problems := _differences(here, saved):
            raise ConfigError(
                f"checkpoint {checkpoint.path.name} does not fit this run: {'; '.join(problems)}; give another folder, "
                "or restore what it was made with"
            )
        # Under `Trainer`'s own schedule, the script's learning rate counts.
        has_own_rate = any(isinstance(value, LearningRate) for value in self.objects.values())
        pairs = zip(saved["optimizers"], here["optimizers"], strict=True)
        kept = [text for there, mine in pairs for text in _settings_from(there["state"], mine["state"])]
        kept = [text for text in kept if not (has_own_rate and text.split(" ")[0] == "lr")]
        self._load(saved)
        position = shard_as({name: saved[name] for name in ("epoch", "updates", "loaders", "saved_in", "random")}, None)
        states = position.pop("random")
        random = states[strategy.world.rank] if len(states) == strategy.world.size else None
        if random is None:  # each number of ranks draws other numbers
            torch.manual_seed(mix_seeds(position["updates"], strategy.world.rank))
        if strategy.world.is_root:
            ranks = f"{len(states)} rank{'s' * (len(states) > 1)}"
            written = f"written {checkpoint.facts['written']} by {ranks}"
            print_line(f"trainer: going on from checkpoint {checkpoint.path.name}, {written}", sys.stderr)
            if kept:
                print_line(f"trainer: from the checkpoint, not from the script: {', '.join(kept)}", sys.stderr)
        return Resumed(checkpoint=checkpoint, random=random, positions=position.pop("loaders"), **position)

    def _load(self, saved: Mapping[str, Any]) -> None:
        for model, state in zip(self.prepared.models, saved["models"], strict=True):
            model.load_state_dict(shard_as(state, model.state_dict()))
        for optimizer, state in zip(self.prepared.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(shard_optimizer_state(state["state"], optimizer))
            align_state(optimizer)
        for synchronizer, state in zip(self.prepared.models.values(), saved["synchronizers"], strict=True):
            # It takes what it can use: other settings than the checkpoint's are fine.
            synchronizer.load_state_dict(shard_as(state, None))
        for name, value in self.objects.items():
            if type(value) is dict:
                loaded = shard_as(saved["objects"][name], value)
                value.clear()
                value.update(loaded)
                continue
            try:
                value.load_state_dict(shard_as(saved["objects"][name], value.state_dict()))
            except Exception as error:
                reason = " ".join(str(error).split())
                raise ConfigError(
                    f"state {name!r} of the checkpoint does not fit this {type(value).__name__}: {reason}"
                ) from None


def _settings_from(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings that an optimizer's state has from a checkpoint, and otherwise from the script."""
    for number, (saved, group) in enumerate(zip(there["param_groups"], here["param_groups"], strict=True)):
        where = f" of group {number}" * (len(here["param_groups"]) > 1)
        # A scheduler that has been made has set its first learning rate.
        names = ["initial_lr" if "initial_lr" in group else "lr", *sorted(set(group) - set(_NOT_THE_SCRIPTS))]
        for name in names:
            if is_plain(group[name]) and is_plain(saved.get(name)) and saved.get(name, group[name]) != group[name]:
                yield f"{name.removeprefix('initial_')}{where} = {saved[name]} (script: {group[name]})"


def _class_of(value: Any) -> str:
    """Return a state object's class, and those of schedulers within it: each loads the state of any other."""
    fields = vars(value).values() if isinstance(value, LRScheduler) else ()
    lists = [field for field in fields if isinstance(field, list | tuple)]
    inner = " and ".join(_class_of(one) for inside in lists for one in inside if isinstance(one, LRScheduler))
    return f"{type(value).__name__} of {inner}" if inner else type(value).__name__


def _differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
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

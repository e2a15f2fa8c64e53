"""Contents of a checkpoint: what is kept of a run, and how it is compared and given back."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer.checkpoint.disk.committed import Committed
from trainer.checkpoint.disk.state_files import read_state
from trainer.checkpoint.run.differences import (
    class_of,
    merge_settings,
    model_differences,
    optimizer_differences,
    settings_of,
)
from trainer.cluster.output import print_line
from trainer.data.shard_plan import mix_seeds
from trainer.errors import ConfigError
from trainer.loop.lr_schedule import LearningRate, UsersSchedule
from trainer.loop.prepared import Prepared
from trainer.models.memory_format import align_state
from trainer.models.sharded import shard_as, shard_optimizer_state
from trainer.strategies.base import Strategy


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

    @property
    def is_complete(self) -> bool:
        """Whether the training had reached its end."""
        return bool(self.checkpoint.facts["complete"])


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
        self._kinds = {name: {"class": class_of(value)} for name, value in self.objects.items()}
        self.settings = settings_of(self.prepared.optimizers, self.objects)
        """Settings of the script's optimizers and schedulers; after `load` the checkpoint's, where these apply."""
        # Of a script's own loop, the learning rate is a part of the optimizer's state.
        self._rate_is_scripts = any(isinstance(value, LearningRate) for value in self.objects.values())

    @property
    def lacks_schedule(self) -> bool:
        """Whether a scheduler of torch's sets a learning rate, and no object is one or has one's optimizer."""
        for value in self.objects.values():
            if isinstance(value, LearningRate | UsersSchedule) or hasattr(value, "optimizer"):
                return False
        # PyTorch marks an optimizer's step when a scheduler is made for it.
        return any(hasattr(optimizer.step, "_wrapped_by_lr_sched") for optimizer in self.prepared.optimizers)

    def state(self) -> dict[str, Any]:
        """Return everything, with the live tensors. Every rank calls it: an object's `state_dict` may be collective."""
        models, optimizers = self.prepared.models, self.prepared.optimizers
        self._held = [*models, *optimizers]
        for synchronizer in models.values():
            synchronizer.average_weights(optimizers)
        return {
            "models": [model.state_dict() for model in models],
            "optimizers": [
                {"class": type(optimizer).__name__, "state": optimizer.state_dict()} for optimizer in optimizers
            ],
            "synchronizers": [synchronizer.state_dict() for synchronizer in models.values()],
            "objects": {
                name: value if type(value) is dict else value.state_dict() for name, value in self.objects.items()
            },
            "kinds": self._kinds,
            "settings": self.settings,
        }

    def resume(self, checkpoint: Committed, strategy: Strategy) -> Resumed:
        """Take over a checkpoint, on every rank; say so on rank 0, and which settings the script has changed since.

        Raises:
            ConfigError: it does not fit the run; nothing was changed.
            TrainerError: it cannot be loaded.
        """
        saved = read_state(checkpoint.path, is_mapped=strategy.shards)
        if saved.get("scaler") is not None:  # the scale under fp16, which earlier versions kept apart
            saved["objects"].setdefault("scaler", saved["scaler"])
        if problems := self.differences(saved):
            raise ConfigError(
                f"checkpoint {checkpoint.path.name} does not fit this run: {'; '.join(problems)}; give another folder, "
                "or restore what it was made with"
            )
        differences = self.load(saved)
        position = shard_as({name: saved[name] for name in ("epoch", "updates", "loaders", "saved_in", "random")}, None)
        world, states = strategy.world, position["random"]
        resumed = Resumed(
            checkpoint=checkpoint,
            epoch=position["epoch"],
            updates=position["updates"],
            positions=position["loaders"],
            saved_in=position["saved_in"],
            random=states[world.rank] if len(states) == world.size else None,
        )
        if resumed.random is None:  # each number of ranks draws other numbers
            torch.manual_seed(mix_seeds(resumed.updates, world.rank))
        if world.is_root:
            print_line(f"trainer: {_describe(resumed, len(states))}", sys.stderr)
            if differences:
                print_line(f"trainer: WARNING: the script differs from the checkpoint; {differences}", sys.stderr)
        return resumed

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """Return what keeps a checkpoint from being loaded, in words; nothing is changed."""
        problems: list[str] = []
        for kind, prepared in (("models", self.prepared.models), ("optimizers", self.prepared.optimizers)):
            if len(prepared) != len(saved[kind]):
                problems.append(f"it has {len(saved[kind])} {kind}, and {len(prepared)} were prepared")
        for number, (model, state) in enumerate(zip(self.prepared.models, saved["models"], strict=False)):
            where = f" of model {number}" if len(self.prepared.models) > 1 else ""
            problems += [f"{problem}{where}" for problem in model_differences(model.state_dict(), state)]
        for number, (optimizer, state) in enumerate(zip(self.prepared.optimizers, saved["optimizers"], strict=False)):
            where = f"optimizer {number}" if len(self.prepared.optimizers) > 1 else "the optimizer"
            problems += [f"{where} {problem}" for problem in optimizer_differences(optimizer, state)]
        for name in sorted(set(self.objects) ^ set(saved["objects"])):
            problems.append(f"it has {'no' if name in self.objects else 'a'} state {name!r}")
        kinds = saved.get("kinds", {})  # an older checkpoint has none, and no settings
        for name in [name for name in self._kinds if name in kinds]:
            here, there = self._kinds[name]["class"], kinds[name]["class"]
            if here != there:
                problems.append(f"state {name!r} is a {there} there and a {here} here")
        return problems

    def load(self, saved: Mapping[str, Any]) -> str:
        """Take over a checkpoint's contents, which `differences` has found to fit.

        Returns:
            Which settings of the script are others than the checkpoint's, and which of them apply, in one line.
        """
        for model, state in zip(self.prepared.models, saved["models"], strict=True):
            model.load_state_dict(shard_as(state, model.state_dict()))
        for optimizer, state in zip(self.prepared.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(shard_optimizer_state(state["state"], optimizer))
            align_state(optimizer)
        states = saved.get("synchronizers") or [{}] * len(self.prepared.models)  # an older checkpoint has none
        for synchronizer, state in zip(self.prepared.models.values(), states, strict=True):
            # It takes what it can use: other settings than the checkpoint's are fine.
            synchronizer.load_state_dict(shard_as(state, None))
        self._load_objects(saved["objects"])
        self.settings, differences = merge_settings(
            self.settings, saved.get("settings", {}), rate_is_scripts=self._rate_is_scripts
        )
        return differences

    def _load_objects(self, saved: Mapping[str, Any]) -> None:
        for name, value in self.objects.items():
            if type(value) is dict:
                loaded = shard_as(saved[name], value)
                value.clear()
                value.update(loaded)
                continue
            try:
                value.load_state_dict(shard_as(saved[name], value.state_dict()))
            except Exception as error:
                reason = " ".join(str(error).split())
                raise ConfigError(
                    f"state {name!r} of the checkpoint does not fit this {type(value).__name__}: {reason}"
                ) from None


def _describe(resumed: Resumed, ranks: int) -> str:
    facts = resumed.checkpoint.facts
    position = resumed.positions[resumed.saved_in] if resumed.saved_in is not None else {"taken": 0}
    where = f"the end of epoch {resumed.epoch}"
    if taken := position["taken"]:
        where = f"epoch {resumed.epoch + 1} after {taken:,} {position.get('unit', 'samples')}"
    if resumed.is_complete:
        where += " and of the training"
    return (
        f"going on from checkpoint {resumed.checkpoint.path.name}, {where}, written {facts['written']} by {ranks} "
        f"rank{'s' * (ranks > 1)}"
    )

"""Contents of a checkpoint: what is kept of a run, and how it is compared and given back."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer.checkpoint.disk.committed import Committed
from trainer.checkpoint.disk.state_files import read_state
from trainer.checkpoint.run.differences import class_of, differences, settings_from
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
            "kinds": {name: {"class": class_of(value)} for name, value in self.objects.items()},
        }

    def resume(self, checkpoint: Committed, strategy: Strategy) -> Resumed:
        """Take over a checkpoint, on every rank; say so on rank 0, and which settings are not those of the script.

        Raises:
            ConfigError: it does not fit the run; nothing was changed.
            TrainerError: it cannot be loaded.
        """
        saved = read_state(checkpoint.path, is_mapped=strategy.shards)
        if saved.get("scaler") is not None:  # the scale under fp16, which earlier versions kept apart
            saved["objects"].setdefault("scaler", saved["scaler"])
        here = self._state()
        if problems := differences(here, saved):
            raise ConfigError(
                f"checkpoint {checkpoint.path.name} does not fit this run: {'; '.join(problems)}; give another folder, "
                "or restore what it was made with"
            )
        # Under `Trainer`'s own schedule, the script's learning rate counts.
        has_own_rate = any(isinstance(value, LearningRate) for value in self.objects.values())
        pairs = zip(saved["optimizers"], here["optimizers"], strict=True)
        kept = [text for there, mine in pairs for text in settings_from(there["state"], mine["state"])]
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

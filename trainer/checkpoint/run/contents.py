"""Contents of a checkpoint: what is kept of a run, and how it is compared and given back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from trainer.checkpoint.run.settings import describe_differences, is_rate, kind_differences, kind_of, settings_of
from trainer.checkpoint.run.snapshot import check_plain, count_bytes
from trainer.errors import ConfigError
from trainer.loop.lr_schedule import LearningRate
from trainer.loop.prepared import Prepared
from trainer.models.memory_format import align_state
from trainer.models.sharded import Scattered, shard_as, shard_optimizer_state


@dataclass
class Contents:
    """What a checkpoint keeps beside the position.

    The weights and the optimizers' state are the same on all ranks. Of BatchNorm's running statistics, which are each
    rank's own, those of the rank that writes are kept.
    """

    prepared: Prepared
    """Models and optimizers; what is prepared later counts as well."""
    objects: Mapping[str, Any]
    """The user's own: with `state_dict` and `load_state_dict`, or dicts of plain data."""

    settings: dict[str, str] = field(init=False)
    """What the script has made optimizers and schedulers with; where a checkpoint's count, those."""

    KEYS: ClassVar = ("models", "optimizers", "synchronizers", "scaler", "objects", "kinds", "settings")
    """Of `state`, and of what `load` takes."""

    def __post_init__(self) -> None:
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
        self._kinds = {name: kind_of(value) for name, value in self.objects.items()}
        self.settings = settings_of(self.prepared.optimizers, self.objects)
        # Of a script's own loop, the learning rate is a part of the optimizer's state.
        self._rate_is_own = any(isinstance(value, LearningRate) for value in self.objects.values())

    def state(self) -> dict[str, Any]:
        """Return everything, with the live tensors. Every rank calls it: an object's `state_dict` may be collective."""
        models, optimizers, scaler = self.prepared.models, self.prepared.optimizers, self.prepared.scaler
        self._held = [*models, *optimizers]
        self.prepared.finish_step()
        for synchronizer in models.values():
            synchronizer.settle(optimizers)
        return {
            "models": [model.state_dict() for model in models],
            "optimizers": [
                {"class": type(optimizer).__name__, "state": optimizer.state_dict()} for optimizer in optimizers
            ],
            "synchronizers": [synchronizer.state_dict() for synchronizer in models.values()],
            "scaler": scaler.state_dict() if scaler is not None else None,
            "objects": {
                name: value if type(value) is dict else value.state_dict() for name, value in self.objects.items()
            },
            "kinds": self._kinds,
            "settings": self.settings,
        }

    def bytes(self) -> int:
        """Return about how many bytes a checkpoint will take, also before the first step has made a state.

        Raises:
            TrainerError: a value is of a type that cannot be loaded again as data.
        """
        state = self.state()
        check_plain(state)
        return count_bytes([state["models"], state["synchronizers"], state["objects"]]) + sum(
            max(count_bytes(now["state"]["state"]), _tensors_per_parameter(optimizer) * _parameter_bytes(optimizer))
            for optimizer, now in zip(self.prepared.optimizers, state["optimizers"], strict=True)
        )

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """Return what keeps a checkpoint from being loaded, in words; nothing is changed."""
        problems: list[str] = []
        for kind, prepared in (("models", self.prepared.models), ("optimizers", self.prepared.optimizers)):
            if len(prepared) != len(saved[kind]):
                problems.append(f"it has {len(saved[kind])} {kind}, and {len(prepared)} were prepared")
        for number, (model, state) in enumerate(zip(self.prepared.models, saved["models"], strict=False)):
            where = f" of model {number}" if len(self.prepared.models) > 1 else ""
            problems += [f"{problem}{where}" for problem in _model_differences(model.state_dict(), state)]
        for number, (optimizer, state) in enumerate(zip(self.prepared.optimizers, saved["optimizers"], strict=False)):
            where = f"optimizer {number}" if len(self.prepared.optimizers) > 1 else "the optimizer"
            problems += [f"{where} {problem}" for problem in _optimizer_differences(optimizer, state)]
        for name in sorted(set(self.objects) ^ set(saved["objects"])):
            problems.append(f"it has {'no' if name in self.objects else 'a'} state {name!r}")
        kinds = saved.get("kinds", {})  # an older checkpoint has none, and no settings
        for name in [name for name in self._kinds if name in kinds]:
            problems += kind_differences(name, self._kinds[name], kinds[name])
        if (self.prepared.scaler is None) != (saved["scaler"] is None):
            problems.append(f"it was made {'without' if saved['scaler'] is None else 'under'} precision fp16")
        return problems

    def load(self, saved: Mapping[str, Any]) -> str:
        """Take over a checkpoint's contents, which `differences` has found to fit.

        Returns:
            Which settings of the script are others than the checkpoint's, and which of them count, in one line.
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
        if self.prepared.scaler is not None:
            self.prepared.scaler.load_state_dict(shard_as(saved["scaler"], None))
        self._load_objects(saved["objects"])
        settings = saved.get("settings", {})
        differences = describe_differences(self.settings, settings, rate_is_own=self._rate_is_own)
        for name in self.settings:
            if not (self._rate_is_own and is_rate(name)):
                self.settings[name] = settings.get(name, self.settings[name])
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


def _model_differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
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


def _optimizer_differences(optimizer: Optimizer, saved: Mapping[str, Any]) -> list[str]:
    if (name := type(optimizer).__name__) != saved["class"]:
        return [f"is a {saved['class']} there and a {name} here"]
    here, there = (
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, saved["state"]["param_groups"])
    )
    return [f"has {there} parameters per group there and {here} here"] if here != there else []


def _tensors_per_parameter(optimizer: Optimizer) -> int:
    """Return how many tensors of a parameter's size torch's common optimizers keep for each."""
    settings = optimizer.defaults
    if "betas" in settings:
        return 3 if settings.get("amsgrad") else 2
    return 1 if settings.get("momentum") else 0


def _parameter_bytes(optimizer: Optimizer) -> int:
    return sum(parameter.nbytes for group in optimizer.param_groups for parameter in group["params"])


def _first(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]

"""Settings, each checked: `RunConfig` for the handle, `TrainerConfig` for the whole training loop."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, TypedDict, TypeVar, get_args, get_type_hints

from trainer.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")
_POWERSGD = re.compile(r"powersgd(?::([0-9]+))?")
_POWERSGD_RANK = 4


@dataclass(frozen=True)
class Bound:
    """A condition on a number.

    It stands in a field's `Annotated`. There, a tuple holds every valid value.
    """

    words: str
    holds: Callable[[Any], bool]


_FROM_1 = Bound("at least 1", lambda value: value >= 1)
_FROM_0 = Bound("finite and not negative", lambda value: 0 <= value < math.inf)
_POSITIVE = Bound("finite and positive", lambda value: 0 < value < math.inf)
_64_BITS = Bound("at least 0 and below 2^63", lambda value: 0 <= value < 2**63)
_KINDS: dict[Any, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "an integer"),
    float: (Real, "a number"),
}
"""The accepted type for a field's type, and its name in an error."""


@dataclass(frozen=True, kw_only=True)
class _Checked:
    """Settings that are checked when they are built."""

    _whose = ""

    def __post_init__(self) -> None:
        # Bounds are checked only if all types are right: a text cannot be compared with a number.
        problems = list(self._type_problems()) or [*self._bound_problems(), *self._problems()]
        if problems:
            raise ConfigError("; ".join(problems))

    def _type_problems(self) -> Iterator[str]:
        for name, hint in get_type_hints(type(self)).items():
            (kind, *others), value = get_args(hint) or (hint,), getattr(self, name)
            if kind not in _KINDS or (value is None and others):
                continue
            accepted, words = _KINDS[kind]
            if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
                yield f"{name} is {value!r}; it must be {words}{' or None' * bool(others)}"

    def _bound_problems(self) -> Iterator[str]:
        hints = get_type_hints(type(self), include_extras=True)
        for setting in fields(self):
            value = getattr(self, setting.name)
            for rule in getattr(hints[setting.name], "__metadata__", ()):
                if isinstance(rule, Bound) and value is not None and not rule.holds(value):
                    none = " or None" * (type(None) in get_args(get_args(hints[setting.name])[0]))
                    yield f"{setting.name} is {value}; it must be {rule.words}{none}"
                if isinstance(rule, tuple) and value not in rule and value != setting.default:
                    yield f"{self._whose}{setting.name} is {value!r}; valid are {', '.join(map(str, rule))}"

    def _problems(self) -> Iterator[str]:
        """Yield a sentence for each further problem that a subclass finds."""
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, for a file or a comparison between ranks."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class FsdpConfig(_Checked):
    """What strategy "fsdp" shards, and what it trades for memory. Every field is checked when it is built.

    Raises:
        ConfigError: one or more values are not valid; the text names all of them.
    """

    _whose = "fsdp's "

    blocks: str | tuple[str, ...] = "auto"
    """Class names of the modules that are gathered one at a time. auto takes those that a Sequential, a ModuleList or
    a ModuleDict repeats; () gathers the whole model at once, which saves no memory in a pass."""
    parameter_dtype: Annotated[str | None, (None, "bf16")] = None
    """bf16 gathers and computes in bfloat16; what the optimizer updates stays as it is."""
    reduce_dtype: Annotated[str | None, (None, "fp32", "bf16")] = None
    """Type in which gradients are summed; None takes fp32 if parameters are gathered in bf16, else
    the parameters' type."""
    checkpoint_activations: bool = False
    """Keep the blocks' inputs only, and compute each block a second time in the backward pass."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, and let the CPU take the steps; needs GPUs."""
    shard_over: str | int = "all"
    """Ranks that share one copy of the model: all, those of a "host", or so many, next to one another by rank. Between
    copies the gradients are all-reduced."""

    def _problems(self) -> Iterator[str]:
        if self.blocks != "auto" and not isinstance(self.blocks, tuple):
            yield f"fsdp's blocks is {self.blocks!r}; valid are auto, and a tuple of class names"
        over = self.shard_over
        if over not in ("all", "host") and (not isinstance(over, int) or isinstance(over, bool) or over < 1):
            yield f"fsdp's shard_over is {over!r}; valid are all, host, and a number of ranks"


@dataclass(frozen=True, kw_only=True)
class RunConfig(_Checked):
    """How ranks compute and combine gradients. Every field is checked when it is built.

    Raises:
        ConfigError: one or more values are not valid; the text names all of them.
    """

    accumulate: Annotated[int, _FROM_1] = 1
    """Micro-batches whose gradients are added up on each rank before one all-reduce."""
    precision: Annotated[str, ("fp32", "bf16", "fp16")] = "fp32"
    """bf16 and fp16 run the forward pass under autocast. fp16 needs a GradScaler, which `Trainer` has."""
    compression: str = "none"
    """fp16 and bf16 halve the bytes that are sent and round the gradients; powersgd sends much less.

    fp16 keeps more digits and overflows above 65,504, bf16 has the range of float32.
    powersgd:2 approximates each matrix of gradients by a matrix of rank 2, powersgd by a matrix of rank 4. With
    `sync_every`, they approximate what a round has changed in the weights.
    """
    full_updates: Annotated[int, _FROM_0] = 10
    """How many updates send whole gradients before compression powersgd or `sync_every` begins."""
    sync_every: Annotated[int, _FROM_1] = 1
    """Updates that each rank takes by itself before the ranks average their weights; 1 averages gradients instead."""
    seed: Annotated[int, _64_BITS] = 0
    """Seed of the order of the samples and, with the rank, of the random numbers that ranks draw after `prepare`."""
    sync_batch_norm: bool = False
    """Replace every BatchNorm by a layer that normalizes over the global batch."""
    compile: bool = False
    """Run the model through `torch.compile`."""
    device: Annotated[str, DEVICES] = "auto"
    """auto takes the GPU with this process's local rank if the host has it, else the CPU."""
    hang_timeout_s: Annotated[float | None, _FROM_0] = None
    """Seconds without progress that are a hang; 0 watches for none, None means 540. TRAINER_HANG_TIMEOUT is first."""
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    """Options of strategy "fsdp"."""

    def _problems(self) -> Iterator[str]:
        if self.compression not in ("none", "fp16", "bf16") and not self.powersgd_rank:
            valid = "none, fp16, bf16, powersgd, powersgd:RANK (from 1)"
            yield f"compression is {self.compression!r}; valid are {valid}"
        if self.precision == "fp16" and (setting := self.low_communication_setting):
            yield f"{setting}, which does not go with precision 'fp16' and its loss scale; valid with it are fp32, bf16"
        if type(self.fsdp) is not FsdpConfig:
            yield f"fsdp is {self.fsdp!r}; it takes a trainer.FsdpConfig"

    @property
    def averages_weights(self) -> bool:
        """Whether ranks train by themselves for a round of updates, and then average their weights."""
        return self.sync_every > 1

    @property
    def low_communication_setting(self) -> str:
        """The setting by which ranks send less than all gradients, in words for an error; "" if there is none."""
        if self.sync_every > 1:
            return f"sync_every is {self.sync_every}"
        return f"compression is {self.compression!r}" if self.powersgd_rank else ""

    @property
    def powersgd_rank(self) -> int | None:
        """The rank that compression powersgd approximates gradients by; None without it."""
        match = _POWERSGD.fullmatch(str(self.compression))
        return int(match[1] or _POWERSGD_RANK) if match else None


class RunSettings(TypedDict, total=False):
    """The fields of `RunConfig` one by one, so that an editor completes them and a type checker knows their names."""

    accumulate: int
    precision: str
    compression: str
    full_updates: int
    sync_every: int
    seed: int
    sync_batch_norm: bool
    compile: bool
    device: str
    hang_timeout_s: float | None
    fsdp: FsdpConfig


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(RunConfig):
    """How `Trainer` trains: the settings of the handle, and those of the loop.

    Raises:
        ConfigError: one or more values are not valid; the text names all of them.
    """

    batch_size: Annotated[int, _FROM_1] = 100
    """Samples per rank and step. The global batch is this times the world size times `accumulate`."""
    global_batch_size: Annotated[int | None, _FROM_1] = None
    """Samples of all ranks and step, in place of `batch_size`: the same training on any number of ranks."""
    eval_batch_size: Annotated[int | None, _FROM_1] = None
    """Samples per rank and step of an evaluation; None takes `batch_size`."""
    clip_norm: Annotated[float | None, _POSITIVE] = None
    """Largest 2-norm of the all-reduced gradient over all parameters; None does not clip."""
    shuffle: bool = True
    """Train in a new order in every epoch; otherwise in the order of the dataset."""
    scale_lr: bool = True
    """Multiply the learning rate by world size × accumulate (Goyal et al. 2017).

    With `global_batch_size`, which does not grow with the ranks, by accumulate alone. False leaves the learning rate to
    the script, as in a single process: there is no warm-up either, and no decay unless it is given.
    """
    warmup_epochs: Annotated[float, _FROM_0] = 1.0
    """Epochs of warm-up, from the single-rank learning rate to the scaled one; with `global_batch_size` from 0."""
    decay: Annotated[str | None, ("none", "cosine")] = None
    """Decay of the learning rate after the warm-up; None takes cosine where the rate is scaled."""
    channels_last: bool = False
    """Keep 4-D inputs and the weights of 2-D convolutions in NHWC order, which convolutions on GPUs under bf16 and fp16
    prefer, and those on the CPUs of docs/results.md in fp32, too. The weights keep this order after the training.

    Under strategy "fsdp", which shards rows, the weights keep their order.
    """
    num_workers: Annotated[int, _FROM_0] = 0
    """DataLoader processes per rank, for datasets that are not tensors in memory."""
    log_every_s: Annotated[float, _FROM_0] = 10.0
    """Seconds between progress lines where there is no terminal."""
    log_every_updates: Annotated[int, _FROM_0] = 50
    """Updates between two points of the loss and the learning rate in the run's record; 0 leaves them out."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(_Checked):
    """When checkpoints are written, and how many are kept. A run resumes from the newest in the folder, if any.

    One is written at the end of the training and before a preemption in any case.

    Raises:
        ConfigError: one or more values are not valid; the text names all of them.
    """

    folder: str | Path
    """On a disk of each host, or on a file system that hosts share."""
    every_s: Annotated[float | None, _POSITIVE] = None
    """Seconds between two checkpoints; 600 where no interval is given."""
    every_updates: Annotated[int | None, _POSITIVE] = None
    """Updates between two checkpoints."""
    every_epochs: Annotated[int | None, _POSITIVE] = None
    """Epochs between two checkpoints, each after what the loop does at the end of an epoch."""
    keep: Annotated[int, _FROM_1] = 3
    """How many of the newest checkpoints are kept. An older one is removed once the next has been committed."""
    best: Annotated[str | None, ("min", "max")] = None
    """Also keep the checkpoint with the least or the greatest score; see `Checkpoints.rate`."""
    metric: str = "loss"
    """The validation metric that `Trainer` takes for the score."""
    on_error: Annotated[str, ("continue", "stop")] = "continue"
    """What to do if a checkpoint cannot be written, for example because the disk is full."""
    grace_s: Annotated[float, _FROM_0] = 20.0
    """Seconds between a preemption's signal and the time at which the process has to have ended."""

    def _problems(self) -> Iterator[str]:
        intervals = ("every_s", "every_updates", "every_epochs")
        given = [name for name in intervals if getattr(self, name) is not None]
        if len(given) > 1:
            yield f"{' and '.join(given)} are given; checkpoints take one interval"
        if not str(self.folder):
            yield "the folder of the checkpoints has no name"


_SettingsT = TypeVar("_SettingsT", bound="RunConfig | CheckpointConfig")


def settings_from(kind: type[_SettingsT], call: str, others: Sequence[str] = (), **settings: Any) -> _SettingsT:
    """Build the settings that a function was given as keyword arguments.

    Args:
        call: the function's name, for the error.
        others: the function's other parameters.

    Raises:
        ConfigError: a setting's name or value is not valid.
    """
    valid: list[str] = [setting.name for setting in fields(kind)]
    for name in settings:
        if name not in valid:
            raise ConfigError(f"{call} has no setting {name!r}; valid are {', '.join((*others, *valid))}")
    return kind(**settings)

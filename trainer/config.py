"""Settings, each checked: `RunConfig` for the handle, `TrainerConfig` for the whole training loop."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from trainer.errors import ConfigError

PRECISIONS = ("fp32", "bf16", "fp16")
COMPRESSIONS = ("none", "fp16")
REDUCTIONS = ("average", "adasum")
DECAYS = ("none", "cosine")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How ranks compute and combine gradients. Every field is checked when it is built.

    Raises:
        ConfigError: one or more values are not valid; the text names all of them.
    """

    accumulate: int = 1
    """Micro-batches whose gradients are added up on each rank before one all-reduce."""
    precision: str = "fp32"
    """One of `PRECISIONS`: bf16 and fp16 run the forward pass under autocast, fp16 with a gradient scaler."""
    compression: str = "none"
    """One of `COMPRESSIONS`: fp16 halves the bytes that are sent and rounds the gradients."""
    reduction: str = "average"
    """One of `REDUCTIONS`: how gradients are combined. Adasum (Maleki et al. 2020) needs Horovod over MPI."""
    seed: int = 0
    """Seed of the order of the samples and, together with the rank, of the random numbers that `Trainer.fit` draws."""
    sync_batch_norm: bool = False
    """Replace every BatchNorm by one that normalizes over the global batch."""
    compile: bool = False
    """Run the model through `torch.compile`."""
    dynamic_graph: bool = False
    """A step may leave parameters without a gradient, also on some ranks only. Costs a little speed."""
    device: str = "auto"
    """One of `DEVICES`: auto takes the GPU with this process's local rank, where there is one."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigError("; ".join(problems))

    def _problems(self) -> Iterator[str]:
        yield from self._not_in(precision=PRECISIONS, compression=COMPRESSIONS, reduction=REDUCTIONS, device=DEVICES)
        yield from self._not_positive("accumulate")
        yield from self._negative("seed")
        if self.seed >= 2**63:
            yield f"seed is {self.seed}; it must be below 2^63"
        if self.reduction == "adasum" and self.precision == "fp16":
            yield "reduction is 'adasum', which combines finished steps, not gradients: it does not go with fp16"

    def _not_in(self, **valid: Sequence[str]) -> Iterator[str]:
        for name, names in valid.items():
            if getattr(self, name) not in names:
                yield f"{name} is {getattr(self, name)!r}; valid are {', '.join(names)}"

    def _not_positive(self, *names: str) -> Iterator[str]:
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                yield f"{name} is {value}; it must be at least 1"

    def _negative(self, *names: str) -> Iterator[str]:
        for name in names:
            if not 0 <= getattr(self, name) < math.inf:
                yield f"{name} is {getattr(self, name)}; it must be finite and not negative"

    def as_dict(self) -> dict[str, object]:
        """The settings as plain values, for a file or a comparison between ranks."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(RunConfig):
    """How `Trainer` trains: the settings of the handle, and those of the loop.

    Raises:
        ConfigError: one or more values are not valid; the text names all of them.
    """

    batch_size: int = 100
    """Samples per rank and step. The global batch is this times the world size times `accumulate`."""
    eval_batch_size: int | None = None
    """Samples per rank and step of an evaluation; None takes `batch_size`."""
    clip_norm: float | None = None
    """Largest 2-norm of the all-reduced gradient over all parameters; None does not clip."""
    scale_lr: bool = True
    """Multiply the learning rate by world size × accumulate (Goyal et al. 2017). Never done for Adasum."""
    warmup_epochs: float = 1.0
    """Epochs of warm-up, from the single-rank learning rate to the scaled one."""
    decay: str = "cosine"
    """One of `DECAYS`: decay of the learning rate after the warm-up."""
    channels_last: bool = False
    """Pass 4-D inputs to the model in NHWC order, which convolutions on GPUs and on CPUs under bf16 prefer.

    The weights keep their order. A model with weights in NHWC order too trains the same, under every strategy.
    """
    num_workers: int = 0
    """DataLoader processes per rank, for datasets that are not tensors in memory."""
    log_every_s: float = 10.0
    """Seconds between progress lines where there is no terminal."""
    log_every_updates: int = 50
    """Updates between two points of the loss and the learning rate in the run's record; 0 leaves them out."""

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from self._not_in(decay=DECAYS)
        yield from self._not_positive("batch_size", "eval_batch_size")
        yield from self._negative("warmup_epochs", "num_workers", "log_every_s", "log_every_updates")
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            yield f"clip_norm is {self.clip_norm}; it must be finite and positive, or None for no clipping"
        if self.reduction == "adasum" and self.clip_norm is not None:
            yield "reduction is 'adasum', which combines finished steps, not gradients: it does not go with clip_norm"

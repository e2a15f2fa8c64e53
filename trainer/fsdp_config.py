"""Settings of strategy "fsdp"."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from trainer.errors import ConfigError

PARAMETER_DTYPES = (None, "bf16")
REDUCE_DTYPES = (None, "fp32", "bf16")


@dataclass(frozen=True, kw_only=True)
class FsdpConfig:
    """What strategy "fsdp" shards, and what it trades for memory. Every field is checked when it is built.

    Raises:
        ConfigError: one or more values are not valid; the text names all of them.
    """

    blocks: str | tuple[str, ...] = "auto"
    """Class names of the modules that are gathered one at a time. auto takes those that a Sequential, a ModuleList or
    a ModuleDict repeats; () gathers the whole model at once, which saves no memory in a pass."""
    parameter_dtype: str | None = None
    """One of `PARAMETER_DTYPES`: bf16 gathers and computes in bfloat16; what the optimizer updates stays as it is."""
    reduce_dtype: str | None = None
    """One of `REDUCE_DTYPES`, for the sum of the gradients; None takes fp32 where parameters are gathered in bf16, and
    the parameters' own type otherwise."""
    checkpoint_activations: bool = False
    """Keep the blocks' inputs only, and compute each block a second time in the backward pass."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, and let the CPU take the steps; needs GPUs."""
    shard_over: str | int = "all"
    """Ranks that share one copy of the model: all, those of a "host", or so many, next to one another by rank. Between
    copies the gradients are all-reduced."""

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise ConfigError("; ".join(problems))

    def as_dict(self) -> dict[str, Any]:
        """The settings as plain values, for a file or a comparison between ranks."""
        return asdict(self)

    def _problems(self) -> Iterator[str]:
        if self.blocks != "auto" and not isinstance(self.blocks, tuple):
            yield f"fsdp's blocks is {self.blocks!r}; valid are auto, and a tuple of class names"
        for name, valid in (("parameter_dtype", PARAMETER_DTYPES), ("reduce_dtype", REDUCE_DTYPES)):
            if getattr(self, name) not in valid:
                yield f"fsdp's {name} is {getattr(self, name)!r}; valid are {', '.join(map(str, valid))}"
        over = self.shard_over
        if over not in ("all", "host") and (not isinstance(over, int) or isinstance(over, bool) or over < 1):
            yield f"fsdp's shard_over is {over!r}; valid are all, host, and a number of ranks"

"""Step timer: measures where the time of each step goes when TRAINER_TIMING names a file, for scripts/scaling_test.py.

A step of one rank is cut at four moments: it begins (the loader is asked for a batch), the batch is there, the last
gradient is there, the gradients of all ranks have been combined (the optimizer begins its own work). So

    input    = from the beginning to the batch
    blocked  = from the last gradient to the combined ones: the part of the exchange that nothing hides
    compute  = everything else

All ranks leave an all-reduce together, so the rank that is blocked for the shortest time is the straggler: its time is
that of the exchange, and what the others are blocked for beyond it is waiting. On GPUs the moments are CUDA events in
the stream that computes, on CPUs those of the clock.

With TRAINER_TIMING_STEPS=n an epoch ends after n steps: such a run measures, and does not train to the end. With
TRAINER_TIMING_EXCHANGE=no the ranks do not all-reduce their gradients, and so show what they compute side by side.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.cluster.network import machine_id
from trainer.cluster.world import World
from trainer.errors import ConfigError, TrainerError
from trainer.profiling.epoch_timing import RankTimes, StepTimes, summarize
from trainer.tuning.host import host_cores

WARM_UP_STEPS = 5
"""Left out at the beginning of a run: memory, caches and connections are new."""


class TimedStep(Protocol):
    """What the timer reads of a loader's step."""

    @property
    def count(self) -> int: ...


class TimedPlan(Protocol):
    """What the timer reads of a loader's shard plan."""

    @property
    def samples(self) -> int: ...
    @property
    def accumulate(self) -> int: ...


class TimedStrategy(Protocol):
    """What the timer asks of a strategy."""

    world: World

    def all_gather_object(self, value: Any) -> list[Any]: ...
    def exchange_seconds(self) -> float | None: ...


StepT = TypeVar("StepT", bound=TimedStep)


@cache
def step_timer() -> StepTimer | None:
    """Return this process's timer; None unless TRAINER_TIMING is set."""
    settings = timing_settings()
    return StepTimer(*settings) if settings else None


class TimingSettings(NamedTuple):
    """What the environment asks for."""

    file: Path
    """Where an epoch's timing is appended."""
    steps: int | None
    """After which an epoch ends; None for all of them."""
    exchanges: bool
    """Whether gradients are all-reduced."""


def timing_settings(environ: Mapping[str, str] = os.environ) -> TimingSettings | None:
    """Return what TRAINER_TIMING, TRAINER_TIMING_STEPS and TRAINER_TIMING_EXCHANGE say; None without the first.

    Raises:
        ConfigError: one of the others is not valid.
    """
    file, steps = environ.get("TRAINER_TIMING"), environ.get("TRAINER_TIMING_STEPS")
    exchange = environ.get("TRAINER_TIMING_EXCHANGE") or "yes"
    if not file:
        return None
    if steps and (not steps.isdecimal() or int(steps) < 1):
        raise ConfigError(f"TRAINER_TIMING_STEPS is {steps!r}; valid is a positive number of steps")
    if exchange not in ("yes", "no"):
        raise ConfigError(f"TRAINER_TIMING_EXCHANGE is {exchange!r}; valid are yes and no")
    return TimingSettings(Path(file), int(steps) if steps else None, exchange == "yes")


class StepTimer:
    """Records the moments of each step, and has rank 0 write a line of JSON per epoch.

    Args:
        file: gets an `EpochTiming` a line; appended to where it exists.
        steps: after which an epoch ends; None for all of them.
        exchanges: whether gradients are all-reduced.
    """

    def __init__(self, file: Path, steps: int | None, exchanges: bool = True) -> None:
        self._file, self._steps = file, steps
        self.exchanges = exchanges
        self._strategy: TimedStrategy | None = None
        self._gradient_bytes = 0
        self._gradient_shapes: list[list[int]] = []
        self._full_updates, self._round = 0, 1
        self._gradients: list[tuple[Any, int]] = []
        self._combined: Any = None
        self._synchronized: Any = None
        self._warm = 0

    def watch_model(self, model: nn.Module, *, full_updates: int = 0, sync_every: int = 1) -> None:
        """Record each gradient. Call it before the strategy prepares the model: a gradient is recorded, then sent.

        Args:
            full_updates: left out in addition, because they send more than later ones.
            sync_every: updates of a round; whole rounds are measured.
        """
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._gradient_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        self._gradient_shapes = [list(parameter.shape) for parameter in parameters]
        self._full_updates, self._round = full_updates, sync_every
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def watch_optimizer(self, strategy: TimedStrategy, optimizer: Optimizer) -> None:
        """Record when the optimizer's own step begins. Call it after the strategy has prepared the optimizer."""
        self._strategy = strategy
        # Horovod's optimizer wraps another one, and both call this; the inner one's call is the last.
        optimizer.register_step_pre_hook(lambda *_: self._on_step())

    def mark_synchronized(self) -> None:
        """Record that the gradients are combined, in a loop that waits for them itself to clip or to unscale them."""
        self._synchronized = self._now()

    def epoch(self, steps: Iterator[StepT], plan: TimedPlan) -> Iterator[StepT]:
        """Yield the same steps, timed. Collective: ends with an exchange of what all ranks have measured."""
        # Rounded up to whole rounds, so that the exchange is averaged over the right number of steps.
        whole = plan.accumulate * self._round
        warm_up, wanted = (-(-number // whole) * whole for number in (WARM_UP_STEPS, self._steps or 0))
        warm_up += self._full_updates * plan.accumulate
        if self._steps is not None:
            steps = islice(steps, wanted + warm_up - min(self._warm, warm_up))
        seen: list[tuple[Any, ...]] = []
        while True:
            self._gradients, self._combined, self._synchronized = [], None, None
            begins = self._now()
            step = next(steps, None)
            ready = self._now()
            if step is None:
                break
            yield step
            combined = self._synchronized or self._combined
            seen.append((begins, ready, self._gradients, combined, self._now(), step.count))
            if self._warm < warm_up:
                self._warm += 1
                seen.clear()
                if self._strategy is not None:
                    self._strategy.exchange_seconds()  # counts from here
        if seen and self._strategy is not None:
            self._write(self._strategy, [_step_times(*moments) for moments in seen], plan.samples)

    def _on_gradient(self, parameter: Tensor) -> None:
        self._gradients.append((self._now(), parameter.numel() * parameter.element_size()))

    def _on_step(self) -> None:
        self._combined = self._now()

    def _now(self) -> Any:
        if self._strategy is None or self._strategy.world.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _write(self, strategy: TimedStrategy, steps: Sequence[StepTimes], samples: int) -> None:
        own = RankTimes(
            host=socket.gethostname(), machine=machine_id(), steps=steps, exchange_seconds=strategy.exchange_seconds()
        )
        by_rank = strategy.all_gather_object(own)
        if not strategy.world.is_root:
            return
        timing = summarize(
            by_rank,
            world_size=strategy.world.size,
            cores=host_cores(),
            threads=torch.get_num_threads(),
            device=strategy.world.device.type,
            strategy=type(strategy).__name__.removesuffix("Strategy"),
            gradient_bytes=self._gradient_bytes,
            gradient_shapes=self._gradient_shapes,
            samples_in_epoch=samples,
        )
        try:
            with self._file.open("a") as file:
                file.write(json.dumps(asdict(timing)) + "\n")
        except OSError as error:
            raise TrainerError(f"TRAINER_TIMING: {self._file} cannot be written: {error.strerror or error}") from None


def _step_times(
    begins: Any, ready: Any, gradients: list[tuple[Any, int]], combined: Any, ends: Any, count: int
) -> StepTimes:
    exchanged = bool(gradients) and combined is not None
    last = gradients[-1][0] if gradients else None
    weighed = sum(size * _seconds_between(moment, last) for moment, size in gradients) if exchanged else 0.0
    return StepTimes(
        step=_seconds_between(begins, ends),
        input=_seconds_between(begins, ready),
        blocked=_seconds_between(last, combined) if exchanged else 0.0,
        window=weighed / sum(size for _, size in gradients) if exchanged else 0.0,
        count=count,
        is_update=combined is not None,
    )


def _seconds_between(earlier: Any, later: Any) -> float:
    if isinstance(earlier, float):
        return float(later - earlier)
    later.synchronize()
    return float(earlier.elapsed_time(later)) / 1e3

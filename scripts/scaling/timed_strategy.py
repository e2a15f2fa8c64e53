"""A strategy that times the training: where the seconds of each step go.

A step of one rank is cut at four moments: it begins (the loader is asked for a batch), the batch is there, the last
gradient is there, the gradients of all ranks have been combined. So

    input    = from the beginning to the batch
    blocked  = from the last gradient to the combined ones: the part of the exchange that nothing hides
    compute  = everything else

All ranks leave an all-reduce together, so the rank that is blocked for the shortest time is the straggler: its time is
that of the exchange, and what the others are blocked for beyond it is waiting. On GPUs the moments are CUDA events in
the stream that computes, on CPUs those of the clock.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scaling.epoch_timing import SETTINGS, RankTimes, StepTimes, summarize
from trainer.cluster.network import machine_id
from trainer.cluster.output import print_line
from trainer.config import RunConfig
from trainer.data.base import Loader, Observer
from trainer.data.batches import Step
from trainer.data.loader import InMemory, ShardedLoader
from trainer.errors import ConfigError, TrainerError
from trainer.strategies.base import Strategy
from trainer.strategies.buckets import BucketSynchronizer
from trainer.strategies.gradients import NamedParameters, Synchronizer
from trainer.tuning.host import host_cores

WARM_UP_STEPS = 5
"""Left out at the beginning of a run: memory, caches and connections are new."""


def timed(strategy: Strategy, file: Path, *, steps: int | None = None, exchanges: bool = True) -> Strategy:
    """Have a strategy time every training under it, and rank 0 append an `EpochTiming` to a file, one a line.

    Args:
        steps: after which an epoch ends: such a run measures, and does not train to the end. None for all of them.
        exchanges: False leaves each rank its own gradients, and so shows what the ranks compute side by side.

    Returns:
        The strategy itself, which is of a subclass now: all but what is timed is its own class's.
    """
    if isinstance(strategy, TimedStrategy):  # of an earlier run of the same script
        return strategy
    _extend(strategy, TimedStrategy)
    assert isinstance(strategy, TimedStrategy)  # noqa: S101 (for mypy)
    strategy.timer = StepTimer(strategy, file, steps)
    strategy.exchanges = exchanges
    return strategy


def _extend(instance: object, mixin: type) -> None:
    kind = type(instance)
    instance.__class__ = type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})


class TimedStrategy(Strategy):
    """What `timed` puts before the class of a strategy."""

    timer: StepTimer
    exchanges: bool

    def prepare(self, model: nn.Module, parameters: NamedParameters, config: RunConfig) -> Synchronizer:
        synchronizer = super().prepare(model, parameters, config)
        if not self.exchanges:
            self._leave_apart(synchronizer)
            synchronizer = Synchronizer()
        elif type(synchronizer) is not Synchronizer:  # which has nothing to do, and is known by that
            _extend(synchronizer, TimedSynchronizer)
            synchronizer.timer = self.timer  # type: ignore[attr-defined]
        self.timer.watch_model(model, synchronizer, config)
        return synchronizer

    def _leave_apart(self, synchronizer: Synchronizer) -> None:
        if self.shards:
            raise ConfigError("without exchange there are no whole gradients under fsdp; leave --no-exchange out")
        synchronizer.retire()
        if self.world.size > 1 and self.world.is_root:
            print_line("trainer: WARNING: --no-exchange: each rank trains a model of its own", sys.stderr)

    def follow_loader(self, loader: Loader) -> None:
        super().follow_loader(loader)
        if loader.training:
            loader.observers.append(self.timer)

    def start_gradients(self, flat: Tensor, name: str) -> Callable[[], object]:
        """Count the time between the first message of a backward pass and the end of the last one."""
        timer = self.timer
        timer.sending.append(time.perf_counter())
        wait = super().start_gradients(flat, name)

        def wait_and_count() -> None:
            wait()
            began = timer.sending.pop()
            if not timer.sending:
                timer.exchange_seconds += time.perf_counter() - began

        return wait_and_count


class TimedSynchronizer(Synchronizer):
    """What is put before the class of a timed strategy's synchronizers."""

    timer: StepTimer

    def complete(self) -> None:
        super().complete()
        self.timer.mark_combined()


class StepTimer(Observer):
    """Records the moments of each step, and has rank 0 write a line of JSON per epoch.

    Args:
        strategy: of the ranks that train.
        file: gets an `EpochTiming` a line; appended to where it exists.
        steps: after which an epoch ends; None for all of them.
    """

    def __init__(self, strategy: Strategy, file: Path, steps: int | None) -> None:
        self._strategy, self._file, self._steps = strategy, file, steps
        self._is_on_cpu = strategy.world.device.type == "cpu"
        self.sending: list[float] = []
        """When each message was sent that is not waited for yet, the first one first."""
        self.exchange_seconds = 0.0
        """In messages of gradients since the warm-up, or since the last epoch."""
        self._tells_exchange = False
        """Whether the messages are those of the strategy's own buckets, so that their seconds are the exchange's."""
        self._gradient_bytes = 0
        self._gradient_shapes: list[list[int]] = []
        self._full_updates, self._round = 0, 1
        self._settings: dict[str, Any] = {}
        self._gradients: list[tuple[Any, int]] = []
        self._combined: Any = None
        self._warm = 0

    def watch_model(self, model: nn.Module, synchronizer: Synchronizer, config: RunConfig) -> None:
        """Record each gradient of a model; a synchronizer's own hooks come after these, so it is recorded, then sent.

        Args:
            config: updates that send whole gradients are left out, because they send more than later ones, and whole
                rounds of `sync_every` are measured.
        """
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._gradient_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        self._gradient_shapes = [list(parameter.shape) for parameter in parameters]
        self._full_updates = config.full_updates if config.low_communication_setting else 0
        self._round = config.sync_every
        self._settings = {name: getattr(config, name) for name in SETTINGS}
        self._tells_exchange = isinstance(synchronizer, BucketSynchronizer)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def mark_combined(self) -> None:
        """Record that the gradients are combined."""
        self._combined = self._now()

    def wrap(self, loader: Loader, steps: Iterator[Step]) -> Iterator[Step]:
        """Yield the loader's steps, timed. Collective: ends with an exchange of what all ranks have measured."""
        # Rounded up to whole rounds, so that the exchange is averaged over the right number of steps.
        whole = loader.accumulate * self._round
        warm_up, wanted = (-(-number // whole) * whole for number in (WARM_UP_STEPS, self._steps or 0))
        warm_up += self._full_updates * loader.accumulate
        if self._steps is not None:
            steps = islice(steps, wanted + warm_up - min(self._warm, warm_up))
        seen: list[tuple[Any, ...]] = []
        while True:
            self._gradients, self._combined = [], None
            begins = self._now()
            step = next(steps, None)
            ready = self._now()
            if step is None:
                break
            yield step
            combined = self._combined
            if combined is None and step.closes_update:  # alone, or without exchange
                combined = self._gradients[-1][0] if self._gradients else self._now()
            seen.append((begins, ready, self._gradients, combined, self._now(), step.count))
            if self._warm < warm_up:
                self._warm += 1
                seen.clear()
                self.exchange_seconds = 0.0
        if seen:
            samples = loader.epoch_samples or loader.samples_after(len(seen))
            self._write([_step_times(*moments) for moments in seen], samples, _workers_of(loader))

    def _on_gradient(self, parameter: Tensor) -> None:
        self._gradients.append((self._now(), parameter.numel() * parameter.element_size()))

    def _now(self) -> Any:
        if self._is_on_cpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _write(self, steps: Sequence[StepTimes], samples: int, workers: int | None) -> None:
        strategy = self._strategy
        seconds, self.exchange_seconds = self.exchange_seconds if self._tells_exchange else None, 0.0
        times = RankTimes(host=socket.gethostname(), machine=machine_id(), steps=steps, exchange_seconds=seconds)
        by_rank = strategy.all_gather_object(times)
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
            settings=self._settings,
            workers=workers,
            samples_in_epoch=samples,
        )
        try:
            with self._file.open("a") as file:
                file.write(json.dumps(asdict(timing)) + "\n")
        except OSError as error:
            raise TrainerError(f"the timing cannot be written to {self._file}: {error.strerror or error}") from None


def _workers_of(loader: Loader) -> int | None:
    in_memory = isinstance(loader, ShardedLoader) and isinstance(loader.dataset, InMemory)
    return None if in_memory else loader.num_workers


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

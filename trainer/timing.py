"""Where the time of each step goes: measured when TRAINER_TIMING names a file, for `scripts/scaling_test.py`.

A step of one rank is cut at four moments: it begins (the loader is asked for a batch), the batch is there, the last
gradient is there, the gradients of all ranks have been combined (the optimizer begins its own work). So

    input    = from the beginning to the batch
    blocked  = from the last gradient to the combined ones: what the exchange costs that nothing hides
    compute  = everything else

All ranks leave an exchange together, so the rank that is blocked for the shortest time is the one that the others
waited for: its time is that of the exchange, and what the others are blocked for beyond it is waiting for it. On GPUs
the moments are CUDA events in the stream that computes, on CPUs those of the clock.

With TRAINER_TIMING_STEPS=n an epoch ends after n steps: such a run measures, and does not train to the end.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.config import timing_settings
from trainer.errors import TrainerError
from trainer.tuning import host_cores, machine

if TYPE_CHECKING:
    from trainer.data.loader import Step
    from trainer.data.sharding import ShardPlan
    from trainer.strategies.base import Strategy

WARM_UP_STEPS = 5
"""Left out at the beginning of a run: memory, caches and connections are new."""


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Mean seconds of a step of one rank."""

    step: float
    input: float
    compute: float
    blocked: float


@dataclass(frozen=True, kw_only=True)
class EpochTiming:
    """One epoch of all ranks, after the warm-up. Times are mean seconds of a step, over steps and ranks."""

    world_size: int
    hosts: list[str]
    """Of each rank."""
    machines: int
    """How many there are: containers of one machine count once."""
    cores: int
    """Of rank 0's host."""
    threads: int
    """PyTorch's, per rank."""
    device: str
    strategy: str
    gradient_bytes: int
    """That each rank exchanges in an update, before compression."""
    samples_in_epoch: int
    """In the whole dataset."""
    steps: int
    """That were measured."""
    updates: int
    """Exchanges in those steps."""
    samples: int
    """That all ranks together took in those steps."""
    seconds: float
    """That the slowest rank took for them."""
    input: float
    compute: float
    exchange: float
    """That the rank on which the others wait is blocked for."""
    waiting: float
    """For that rank."""
    hidden: float | None
    """Of the exchange, beside the backward pass; None where the strategy cannot see it."""
    window: float
    """For how long a gradient waits for the last one, mean over their bytes: what an exchange in pieces can hide in."""
    own: list[float]
    """Seconds of a step in which its rank is not blocked, from the quickest steps to the slowest: the means of up to
    100 groups of equally many. The steps of one update count as one, their mean."""
    ranks: list[Phases]


@cache
def step_timer() -> StepTimer | None:
    """This process's; None where nobody has asked for one."""
    settings = timing_settings()
    return StepTimer(*settings) if settings else None


class StepTimer:
    """Notes the moments of each step, and has rank 0 write a line of JSON per epoch.

    Args:
        file: gets an `EpochTiming` a line; a new file, or one of an earlier epoch.
        steps: after which an epoch ends; None for all of them.
    """

    def __init__(self, file: Path, steps: int | None) -> None:
        self._file, self._steps = file, steps
        self._strategy: Strategy | None = None
        self._gradient_bytes = 0
        self._gradients: list[tuple[Any, int]] = []
        self._combined: Any = None
        self._synchronized: Any = None
        self._warm = 0

    def watch_model(self, model: nn.Module) -> None:
        """Before the strategy sees it, so that a gradient is noted before it is sent."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._gradient_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def watch_optimizer(self, strategy: Strategy, optimizer: Optimizer) -> None:
        """After the strategy has made it: the optimizer's own step begins when all hooks before it are done."""
        self._strategy = strategy
        # Horovod's optimizer is one around another one, and both call this; the inner one's call is the last.
        optimizer.register_step_pre_hook(lambda *_: self._on_step())

    def gradients_are_there(self) -> None:
        """For a loop that waits for them itself, to clip or to unscale them: what follows is its own work."""
        self._synchronized = self._now()

    def epoch(self, steps: Iterator[Step], plan: ShardPlan) -> Iterator[Step]:
        """The same steps, watched. Collective: ends with what all ranks have seen."""
        # Whole updates: with a part of one, exchanges would count for more or less than they cost.
        warm_up, wanted = (
            -(-number // plan.accumulate) * plan.accumulate for number in (WARM_UP_STEPS, self._steps or 0)
        )
        if self._steps is not None:
            steps = islice(steps, wanted + warm_up - min(self._warm, warm_up))
        seen = []
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
            self._write(seen, plan.samples)

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

    def _write(self, seen: Sequence[tuple[Any, ...]], samples: int) -> None:
        assert self._strategy is not None  # noqa: S101 (the caller has looked)
        strategy = self._strategy
        rows = [_row(*moments) for moments in seen]
        facts = {"host": socket.gethostname(), "machine": machine(), "rows": rows}
        everybody = strategy.all_gather_object({**facts, "exchange": strategy.exchange_seconds()})
        if not strategy.world.is_root:
            return
        timing = _summary(everybody, strategy, self._gradient_bytes, samples)
        try:
            with self._file.open("a") as file:
                file.write(json.dumps(asdict(timing)) + "\n")
        except OSError as error:
            raise TrainerError(f"TRAINER_TIMING: {self._file} cannot be written: {error.strerror or error}") from None


@dataclass(frozen=True)
class _Row:
    """Seconds of one step of one rank."""

    step: float
    input: float
    blocked: float
    window: float
    count: int
    is_update: bool


def _row(begins: Any, ready: Any, gradients: list[tuple[Any, int]], combined: Any, ends: Any, count: int) -> _Row:
    exchanged = bool(gradients) and combined is not None
    last = gradients[-1][0] if gradients else None
    weighed = sum(size * _between(moment, last) for moment, size in gradients) if exchanged else 0.0
    return _Row(
        step=_between(begins, ends),
        input=_between(begins, ready),
        blocked=_between(last, combined) if exchanged else 0.0,
        window=weighed / sum(size for _, size in gradients) if exchanged else 0.0,
        count=count,
        is_update=combined is not None,
    )


def _between(earlier: Any, later: Any) -> float:
    if isinstance(earlier, float):
        return float(later - earlier)
    later.synchronize()
    return float(earlier.elapsed_time(later)) / 1e3


def _summary(everybody: list[dict[str, Any]], strategy: Strategy, gradient_bytes: int, samples: int) -> EpochTiming:
    by_rank: list[list[_Row]] = [one["rows"] for one in everybody]
    by_step = list(zip(*by_rank, strict=True))
    exchange = fmean(min(row.blocked for row in rows) for rows in by_step)
    phases = [_phases(rows) for rows in by_rank]
    updates = sum(row.is_update for row in by_rank[0])
    busy = [one["exchange"] for one in everybody if one["exchange"] is not None]
    return EpochTiming(
        world_size=strategy.world.size,
        hosts=[one["host"] for one in everybody],
        machines=len({one["machine"] for one in everybody}),
        cores=host_cores(),
        threads=torch.get_num_threads(),
        device=strategy.world.device.type,
        strategy=type(strategy).__name__.removesuffix("Strategy"),
        gradient_bytes=gradient_bytes,
        samples_in_epoch=samples,
        steps=len(by_step),
        updates=updates,
        samples=sum(row.count for rows in by_rank for row in rows),
        seconds=max(sum(row.step for row in rows) for rows in by_rank),
        input=fmean(phase.input for phase in phases),
        compute=fmean(phase.compute for phase in phases),
        exchange=exchange,
        waiting=fmean(phase.blocked for phase in phases) - exchange,
        hidden=max(0.0, min(busy) / len(by_step) - exchange) if busy else None,
        window=fmean(row.window for rows in by_rank for row in rows) * len(by_step) / max(1, updates),
        own=_spread([one for rows in by_rank for one in _own(rows)]),
        ranks=phases,
    )


def _own(rows: Sequence[_Row]) -> Iterator[float]:
    """Seconds by itself of one rank, mean over the steps of each update, since the ranks meet once in an update."""
    taken: list[float] = []
    for row in rows:
        taken.append(row.step - row.blocked)
        if row.is_update:
            yield fmean(taken)
            taken = []


def _spread(seconds: Sequence[float]) -> list[float]:
    groups = np.array_split(np.sort(seconds), min(100, len(seconds))) if seconds else []
    return [round(float(group.mean()), 6) for group in groups]


def _phases(rows: Sequence[_Row]) -> Phases:
    step, put_in, blocked = (fmean(getattr(row, name) for row in rows) for name in ("step", "input", "blocked"))
    return Phases(step=step, input=put_in, compute=step - put_in - blocked, blocked=blocked)

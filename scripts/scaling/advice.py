"""Advice for a shape that scales badly, with a predicted gain for each; for scaling_test.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from scaling.low_rank import RANK
from scaling.models import Link
from trainer.config import RunConfig
from trainer.errors import ConfigError

_STEPS = (2, 4, 8)
_LEAST_GAIN, _LEAST_PREDICTED_GAIN = 1.1, 1.2
"""A smaller gain could not be told from noise, or from what predictions are off by."""
_LEAST_INPUT_SHARE = 0.1
"""Of a step, in which a rank waits for its loader: what is less is not told."""
_LEAST_SHARED_GAIN = 1.5
"""Of compression powersgd where ranks share cores: its two messages wait for time slices, which is not predicted."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurement of a shape under one strategy. Times are mean seconds of a step."""

    shape: str
    strategy: str
    ranks: int
    input: float
    compute: float
    exchange: float
    waiting: float
    hidden: float
    gradient_bytes: int
    samples_per_s: float
    efficiency: float | None
    """None where no single rank was measured with the same number of threads."""
    cores: int
    """Cores of all machines."""
    threads: int
    """Threads of all ranks."""
    on_cpu: bool
    """Whether ranks compute on the cores, and not on GPUs."""
    workers: int | None
    """Processes that load for each rank, 0 where it does so itself; None where the dataset is in memory."""

    @property
    def step(self) -> float:
        return self.input + self.compute + self.exchange + self.waiting

    @property
    def waits_for_loader(self) -> bool:
        return self.input > _LEAST_INPUT_SHARE * self.step

    @property
    def load_s(self) -> float:
        """Return about how many seconds one worker takes for a batch, where a rank waits for its loader."""
        if not self.workers and self.on_cpu:
            return self.input
        # Workers that are waited for are never idle: of k, each makes a batch in k steps. So does a process that loads
        # by itself while its GPU computes; it also starts the GPU's work, so for it this is the most that it can be.
        return max(1, self.workers or 0) * self.step

    @property
    def wanted_workers(self) -> int:
        """Return how many workers make a batch in what a step takes without the waiting for it."""
        return math.ceil(self.load_s / max(self.step - self.input, 1e-9))


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of a shape under one strategy beside its measurement."""

    half_size_ratio: float | None = None
    """Time of an exchange of half the bytes, divided by that of all bytes; None where no link limits it."""
    low_rank_s: float | None = None
    """Predicted seconds of a step's exchange under compression powersgd, its computing included; None if not timed."""
    full_load_s: float = 0.0
    """Seconds of input and compute in a step while all ranks compute. The measured time is shorter where ranks share
    cores and mostly wait for the exchange."""
    accumulate: int = 1
    """Steps of an update already."""
    config: RunConfig = RunConfig()  # noqa: RUF009 (which is frozen)
    """The script's own settings."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A change to the job, and its predicted gain."""

    what: str
    gain: float
    """Predicted samples/s with the change, divided by those without it."""
    options: tuple[str, ...] = ()
    """Options of the examples for the change; empty where it has none. Other scripts may name them differently."""


def advise(run: Measured, others: Sequence[Measured], known: Known) -> list[Advice]:
    """Return the changes that gain something, the largest gain first.

    What is predicted can be off by a fifth, and changes the weights: so it is to gain a fifth at least, and what was
    measured a tenth.

    Args:
        others: all other measurements with the same batch.
    """
    predicted = [
        *_accumulate(run, known),
        *_average_weights(run, known.full_load_s),
        *_compress(run, known.half_size_ratio),
        *_approximate(run, known),
        *_load(run),
    ]
    predicted += _compress_rounds(run, known, predicted)
    predicted = [advice for advice in predicted if _goes_with(known.config, advice)]
    worthwhile = [advice for advice in predicted if advice.gain >= _LEAST_PREDICTED_GAIN]
    worthwhile += [advice for advice in _change(run, others) if advice.gain >= _LEAST_GAIN]
    return sorted(worthwhile, key=lambda advice: -advice.gain)


def _goes_with(config: RunConfig, advice: Advice) -> bool:
    """Return whether the trainer takes the advice beside the script's own settings, none of which is to be replaced."""
    given = dict(zip(advice.options[::2], advice.options[1::2], strict=True))
    names = {"--compression": "compression", "--sync-every": "sync_every"}
    changes: dict[str, Any] = {name: given[option] for option, name in names.items() if option in given}
    if "compression" in changes and config.compression != "none":
        return False
    if "sync_every" in changes:
        if config.averages_weights:
            return False
        changes["sync_every"] = int(changes["sync_every"])
    try:
        replace(config, **changes)
    except ConfigError:
        return False
    return True


def summarize(run: Measured, advice: Sequence[Advice], link: Link | None) -> str:
    """Summarize a measurement and its advice in a few sentences.

    Args:
        link: the slowest link of the shape; None where it was not measured.
    """
    efficiency = "unknown" if run.efficiency is None else f"{run.efficiency:.0%}"
    parts = [f"{run.shape} under {run.strategy}: efficiency {efficiency}."]
    if run.threads > run.cores:
        limit = f"{run.cores / run.threads:.0%}"
        parts.append(f"{run.threads} threads share {run.cores} cores, which limits the efficiency to {limit}.")
    if link is not None and math.isfinite(link.gbit_per_s):
        parts.append(
            f"The link carries {link.gbit_per_s:.3g} Gbit/s; a small message takes {link.latency_s * 1e3:.2g} ms."
        )
    parts.append(
        f"At this batch the exchange takes {run.exchange / run.compute:.2g} × the compute"
        f" and waiting for the slowest rank {run.waiting / run.compute:.2g} ×"
    )
    if run.waits_for_loader:
        parts[-1] += f". {_describe_loading(run)}"
    if not advice:
        parts[-1] += "; no known change is predicted to gain a fifth, or was measured to gain a tenth."
        return " ".join(parts)
    listed = [f"{item.what} for about {item.gain:.2g} ×" for item in advice[:3]]
    return f"{' '.join(parts)}. Advice: {', or '.join(listed)}."


def _describe_loading(run: Measured) -> str:
    share = f"{run.input / run.step:.0%}"
    if run.workers is None:
        return f"Input takes {share} of a step, though the data is in memory: look at what its transform does"
    wants = f"a rank wants {_workers(run.wanted_workers)} (it has {run.workers}) and cores for them, or smaller files"
    return f"Ranks wait for their loaders {share} of a step: {wants}"


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count > 1)}"


def _load(run: Measured) -> list[Advice]:
    if run.workers is None or not run.waits_for_loader:
        return []
    count = min(run.wanted_workers, max(1, run.cores // run.ranks))  # more would wait for one another's cores
    # For so long a step keeps all cores busy: with the loading, and on CPUs with the computing.
    busy_s = (run.ranks * run.load_s + run.threads * run.compute * run.on_cpu) / run.cores
    gain = run.step / max(run.step - run.input, run.load_s / count, busy_s)
    return [Advice(what=f"load with {_workers(count)}", gain=gain, options=("--workers", str(count)))]


def _accumulate(run: Measured, known: Known) -> list[Advice]:
    advice = []
    for steps in _STEPS:
        accumulate = steps * known.accumulate
        what = f"accumulate {accumulate} (a global batch {steps} times as large)"
        gain = run.step / _exchange_every(steps, run, run.exchange, known.full_load_s)
        advice.append(Advice(what=what, gain=gain, options=("--accumulate", str(accumulate))))
    return _fewest_steps(advice)


def _average_weights(run: Measured, full_load_s: float) -> list[Advice]:
    """Advise to average the weights after k updates of each rank's own; no backward pass hides that exchange."""
    advice = []
    for steps in _STEPS:
        gain = run.step / _exchange_every(steps, run, run.exchange + run.hidden, full_load_s)
        advice.append(Advice(what=_describe_round(steps), gain=gain, options=("--sync-every", str(steps))))
    return _fewest_steps(advice)


def _describe_round(steps: int) -> str:
    return f"average weights every {steps} updates (sync_every={steps}: other weights)"


def _compress_rounds(run: Measured, known: Known, simpler: Sequence[Advice]) -> list[Advice]:
    """Advise rounds of `sync_every` that send their changes as powersgd, where they gain more than each by itself.

    They change the weights twice over, so they are to gain another fifth. On shared cores nothing is advised that
    powersgd by itself is not advised for.
    """
    compression = [advice for advice in simpler if advice.options == ("--compression", f"powersgd:{RANK}")]
    if known.low_rank_s is None or not compression:
        return []
    advice = []
    for steps in _STEPS:
        gain = run.step / _exchange_every(steps, run, known.low_rank_s, known.full_load_s)
        what = f"{_describe_round(steps)} with compression powersgd:{RANK}"
        options = ("--sync-every", str(steps), *compression[0].options)
        advice.append(Advice(what=what, gain=gain, options=options))
    most = max(item.gain for item in simpler)
    return _fewest_steps(advice, least=_LEAST_PREDICTED_GAIN * most)


def _exchange_every(steps: int, run: Measured, exchange_s: float, full_load_s: float) -> float:
    """Return the seconds of a step with an exchange after so many.

    The variations of the steps add up like independent noise, with the square root of their number.
    """
    return max(full_load_s, run.input + run.compute) + exchange_s / steps + run.waiting / math.sqrt(steps)


def _fewest_steps(advice: Sequence[Advice], least: float = 0.0) -> list[Advice]:
    """Return the first with most of the largest gain, because more steps without an exchange can cost accuracy.

    Args:
        least: gain that it has to have; without it nothing is returned.
    """
    enough = max(least, 1 + 0.75 * (max(item.gain for item in advice) - 1))
    return [item for item in advice if item.gain >= enough][:1]


def _approximate(run: Measured, known: Known) -> list[Advice]:
    """Advise compression powersgd. Ranks that share a link wait for each other the longer, the longer they send."""
    if known.low_rank_s is None:
        return []
    shorter = min(1.0, known.low_rank_s / max(run.exchange + run.hidden, 1e-9))
    step = max(known.full_load_s, run.input + run.compute) + known.low_rank_s + run.waiting * shorter
    name = f"powersgd:{RANK}"
    what = f"use compression {name} (approximate gradients)"
    gain = run.step / step
    if run.threads > run.cores and gain < _LEAST_SHARED_GAIN:
        return []
    return [Advice(what=what, gain=gain, options=("--compression", name))]


def _compress(run: Measured, half_size_ratio: float | None) -> list[Advice]:
    if half_size_ratio is None:
        return []
    saved = (run.exchange + run.hidden) * (1 - half_size_ratio)
    gain = run.step / (run.step - min(saved, run.exchange))
    # fp16 sends as many bytes, and overflows where a gradient is large.
    return [Advice(what="use bf16 compression", gain=gain, options=("--compression", "bf16"))]


def _change(run: Measured, others: Sequence[Measured]) -> list[Advice]:
    """Advise the fastest other strategy on this shape, and the fastest smaller shape."""
    same = [other for other in others if other.shape == run.shape and other.strategy != run.strategy]
    smaller = [other for other in others if other.ranks < run.ranks]
    advice = []
    if same:
        best = max(same, key=lambda other: other.samples_per_s)
        gain = best.samples_per_s / run.samples_per_s
        advice.append(Advice(what=f"take strategy {best.strategy}", gain=gain, options=("--strategy", best.strategy)))
    if smaller:
        best = max(smaller, key=lambda other: other.samples_per_s)
        advice.append(
            Advice(what=f"stay with {best.shape} ({best.strategy})", gain=best.samples_per_s / run.samples_per_s)
        )
    return advice

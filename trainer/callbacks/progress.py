"""Progress on rank 0: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm

from trainer.callbacks.base import Callback, EpochRecord, FitContext, ProgressEvent

# mpirun gives its ranks pseudo-terminals and prefixes every line, and horovodrun passes whole lines on:
# under both, a bar that redraws itself turns into many fragments of lines.
_LINE_BY_LINE = ("mpirun", "horovodrun", "srun")


class Progress(Callback):
    """Show on rank 0 the epoch, the loss, samples/s over all ranks, and the time left.

    Args:
        every_s: seconds between two lines where there is no terminal. An epoch's end is always reported.
    """

    def __init__(self, every_s: float = 10.0) -> None:
        self._every_s = every_s
        self._next_line = 0.0
        self._started = 0.0
        self._bar: Any = None
        self._on_terminal = False

    def on_fit_start(self, context: FitContext) -> None:
        self._started = time.monotonic()
        self._next_line = self._started + self._every_s
        if context.world.is_root:
            print(context.learning_rate, flush=True)
        self._on_terminal = sys.stderr.isatty() and context.world.launcher not in _LINE_BY_LINE

    def on_progress(self, context: FitContext, event: ProgressEvent) -> None:
        if not context.world.is_root:
            return
        if self._on_terminal:
            self._draw(event)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + self._every_s
            left = _clock(self._time_left(event))
            print(
                f"epoch {event.epoch}/{event.epochs}  {event.done}/{event.samples}  loss {event.loss:.4f}  "
                f"{event.samples_per_s:,.0f} samples/s  {left} left",
                flush=True,
            )

    def on_epoch_end(self, context: FitContext, record: EpochRecord) -> None:
        if not context.world.is_root:
            return
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        print(_describe(record), flush=True)

    def _draw(self, event: ProgressEvent) -> None:
        if self._bar is None:
            self._bar = tqdm(
                total=event.samples,
                unit=" samples",
                unit_scale=True,
                leave=False,
                dynamic_ncols=True,
                bar_format="{desc} {percentage:3.0f}%|{bar}| {postfix}",
            )
        self._bar.set_description_str(f"epoch {event.epoch}/{event.epochs}", refresh=False)
        self._bar.set_postfix_str(
            f"loss {event.loss:.4f}, {event.samples_per_s:,.0f} samples/s, {_clock(self._time_left(event))} left",
            refresh=False,
        )
        self._bar.n = event.done
        self._bar.refresh()

    def _time_left(self, event: ProgressEvent) -> float:
        done = (event.epoch - 1) * event.samples + event.done
        elapsed = time.monotonic() - self._started
        return elapsed / max(done, 1) * (event.epochs * event.samples - done)


def _describe(record: EpochRecord) -> str:
    parts = [f"epoch {record.epoch}/{record.epochs}: loss {record.train_loss:.4f}"]
    if record.validation is not None:
        metrics = record.validation.metrics
        parts += [
            f"validation {name} {metrics[name]:.4f}" if name == "loss" else f"{name} {_value(name, metrics[name])}"
            for name in metrics
        ]
        parts.append(f"evaluated {record.validation.evaluated}/{record.validation.samples}")
    parts.append(f"{record.seconds:.2f} s ({record.samples_per_s:,.0f} samples/s)")
    return ", ".join(parts)


def _value(name: str, value: float) -> str:
    """Format a metric. Only an accuracy is known to be a share."""
    return f"{100 * value:.2f} %" if "accuracy" in name and 0 <= value <= 1 else f"{value:.4f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

"""A bar on rank 0; plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from trainer.callbacks import Callback, EpochRecord, Pulse

if TYPE_CHECKING:
    from trainer.trainer import Trainer

# mpirun gives its ranks pseudo-terminals and prefixes every line, and horovodrun passes on whole lines:
# under both, a bar that redraws itself turns into a heap of fragments.
_LINE_BY_LINE = ("mpirun", "horovodrun", "srun")


class Progress(Callback):
    """Shows on rank 0 how far the training has come: epoch, loss, samples/s over all ranks, time left.

    Args:
        every_s: seconds between two lines where there is no terminal. An epoch's end is always reported.
    """

    def __init__(self, every_s: float = 10.0) -> None:
        self._every_s = every_s
        self._next_line = 0.0
        self._started = 0.0
        self._bar: Any = None
        self._on_terminal = False

    def on_fit_start(self, trainer: Trainer, epochs: int) -> None:
        self._started = time.monotonic()
        self._next_line = self._started + self._every_s
        self._on_terminal = sys.stderr.isatty() and trainer.world.launcher not in _LINE_BY_LINE

    def on_pulse(self, trainer: Trainer, pulse: Pulse) -> None:
        if not trainer.world.is_root:
            return
        if self._on_terminal:
            self._draw(pulse)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + self._every_s
            left = _clock(self._time_left(pulse))
            print(
                f"epoch {pulse.epoch}/{pulse.epochs}  {pulse.done}/{pulse.samples}  loss {pulse.loss:.4f}  "
                f"{pulse.samples_per_s:,.0f} images/s  {left} left",
                flush=True,
            )

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        if not trainer.world.is_root:
            return
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        print(_describe(record), flush=True)

    def _draw(self, pulse: Pulse) -> None:
        if self._bar is None:
            self._bar = tqdm(
                total=pulse.samples,
                unit=" images",
                unit_scale=True,
                leave=False,
                dynamic_ncols=True,
                bar_format="{desc} {percentage:3.0f}%|{bar}| {postfix}",
            )
        self._bar.set_description_str(f"epoch {pulse.epoch}/{pulse.epochs}", refresh=False)
        self._bar.set_postfix_str(
            f"loss {pulse.loss:.4f}, {pulse.samples_per_s:,.0f} images/s, {_clock(self._time_left(pulse))} left",
            refresh=False,
        )
        self._bar.n = pulse.done
        self._bar.refresh()

    def _time_left(self, pulse: Pulse) -> float:
        done = (pulse.epoch - 1) * pulse.samples + pulse.done
        elapsed = time.monotonic() - self._started
        return elapsed / max(done, 1) * (pulse.epochs * pulse.samples - done)


def _describe(record: EpochRecord) -> str:
    parts = [f"epoch {record.epoch}/{record.epochs}: loss {record.train_loss:.4f}"]
    if record.validation is not None:
        metrics = record.validation.metrics
        parts += [
            f"validation {name} {metrics[name]:.4f}" if name == "loss" else f"{name} {_percent(metrics[name])}"
            for name in metrics
        ]
        parts.append(f"evaluated {record.validation.evaluated}/{record.validation.samples}")
    parts.append(f"{record.seconds:.2f} s ({record.samples_per_s:,.0f} images/s)")
    return ", ".join(parts)


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %" if 0 <= value <= 1 else f"{value:.4f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

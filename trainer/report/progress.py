"""The callback that shows the progress of `Trainer` on rank 0."""

from __future__ import annotations

from trainer.cluster.output import print_line
from trainer.report.callback import Callback, EpochRecord, FitContext, ProgressEvent
from trainer.report.display import Display


class Progress(Callback):
    """Show on rank 0 the epoch, the loss, samples/s over all ranks, and the time that is left of the epoch.

    Args:
        every_s: seconds between two lines where there is no terminal. An epoch's end is always reported.
    """

    def __init__(self, every_s: float = 10.0) -> None:
        self._every_s = every_s
        self._display: Display | None = None

    def on_fit_start(self, context: FitContext) -> None:
        if context.world.is_root:
            print_line(context.learning_rate)
            self._display = Display(self._every_s)

    def on_progress(self, context: FitContext, event: ProgressEvent) -> None:
        if self._display is not None:
            head, details = f"epoch {event.epoch}/{event.epochs}", [f"loss {event.loss:.4f}"]
            self._display.show(head, event.done, event.samples, details)

    def on_epoch_end(self, context: FitContext, record: EpochRecord) -> None:
        if self._display is not None:
            self._display.clear()
            print_line(_describe(record))


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

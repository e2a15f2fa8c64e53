"""How far an epoch has come: a bar at the bottom of the job's terminal, a line now and then where there is none."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from functools import partial

from tqdm import tqdm

from trainer.cluster.output import print_line
from trainer.report.bottom_line import BottomLine
from trainer.report.terminal import open_terminal


class Display:
    """Rank 0's view of a loop.

    Args:
        every_s: seconds between two lines where there is no terminal.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._next_line = time.monotonic() + every_s
        disabled = os.environ.get("TQDM_DISABLE", "0") not in ("", "0")
        terminal = None if disabled else open_terminal()
        self._bar = BottomLine(terminal) if terminal is not None else None

    def show(self, head: str, done: int, samples: int | None, details: Sequence[str]) -> None:
        """Show that `done` of `samples` are trained on; of a stream nobody may know how many there are."""
        if self._bar is not None and self._bar.draw(partial(_bar, head, done, samples, details)):
            return
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + self._every_s
            print_line("  ".join([head, f"{done}" if samples is None else f"{done}/{samples}", *details]))

    def clear(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.clear()


def _bar(head: str, done: int, samples: int | None, details: Sequence[str], columns: int) -> str:
    if samples is None:
        return ", ".join([f"{head}  {done:,}", *details])[:columns]
    return tqdm.format_meter(  # type: ignore[call-arg]  # further arguments are for the format
        done,
        samples,
        0,
        ncols=columns,
        prefix=head,
        ascii="utf" not in str(getattr(sys.stderr, "encoding", "")).lower(),
        bar_format="{desc} {percentage:3.0f}%|{bar}| {details}",
        details=", ".join(details),
    )


def clock(seconds: float) -> str:
    """Format a duration, as in 3:10 or 1:02:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

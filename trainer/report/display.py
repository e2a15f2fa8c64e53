"""Show the progress of an epoch: tqdm's bar on a terminal or in a notebook, a line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from trainer.cluster.output import keep_lines_off, print_line

_FORMAT = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"
_ENDLESS_FORMAT = "{desc}  {n_fmt}{postfix}"


class Display:
    """The progress display of a loop, on rank 0.

    Under launchers that give their ranks pipes, such as horovodrun and mpirun, standard error is no terminal.

    Args:
        every_s: seconds between two lines where there is no terminal.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._next_line = time.monotonic() + every_s
        is_declined = os.environ.get("TQDM_DISABLE", "0") not in ("", "0")  # then there are lines
        self._has_bar = not is_declined and (sys.stderr.isatty() or "ipykernel" in sys.modules)
        self._head = ""
        self._bar: Any = None

    def show(self, head: str, done: int, samples: int | None, details: Sequence[str]) -> None:
        """Show that `done` of `samples` samples are done; `samples` is None for a stream of unknown length."""
        if self._has_bar:
            if head != self._head:  # another pass, which may be an evaluation within a training's
                self.clear()
                self._head, self._bar = head, _make_bar(head, samples)
                keep_lines_off(self._bar.clear)
            self._bar.n = done
            self._bar.set_postfix_str(", ".join(details))
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + self._every_s
            print_line("  ".join([head, f"{done}" if samples is None else f"{done}/{samples}", *details]))

    def clear(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            keep_lines_off(None)
            self._bar.close()
            self._head, self._bar = "", None


def _make_bar(head: str, samples: int | None) -> Any:
    from tqdm.auto import tqdm  # a notebook's bar in a notebook

    bar_format = _ENDLESS_FORMAT if samples is None else _FORMAT
    return tqdm(desc=head, total=samples, leave=False, dynamic_ncols=True, bar_format=bar_format)


def time_left(seconds: float, done: float, left: int) -> str:
    """Return the time for `left` samples, if `done` samples took so many seconds: "3:10 left" or "1:02:00 left"."""
    minutes, rest = divmod(round(seconds / done * left), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} left" if hours else f"{minutes}:{rest:02} left"

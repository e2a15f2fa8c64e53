"""Show the progress of an epoch: tqdm's bar on a terminal or in a notebook, a line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from trainer.cluster.output import keep_lines_off, print_line

_INTERVAL_S = 0.2


class Display:
    """The progress display of a loop, on rank 0.

    tqdm computes the rate and the time that is left, and formats the lines as well. Under launchers that give their
    ranks pipes, such as horovodrun and mpirun, standard error is no terminal.

    Args:
        every_s: seconds between two lines where there is no terminal.
    """

    def __init__(self, every_s: float) -> None:
        from tqdm.auto import tqdm  # a notebook's bar in a notebook

        is_declined = os.environ.get("TQDM_DISABLE", "0") not in ("", "0")  # then there are lines
        self._has_bar = not is_declined and (sys.stderr.isatty() or "ipykernel" in sys.modules)
        self._interval_s = _INTERVAL_S if self._has_bar else every_s
        self._next_show = time.monotonic() + self._interval_s
        self._head, self._began = "", 0.0
        self._about: dict[str, Any] = {}
        self._tqdm: Any = tqdm
        self._bar: Any = None

    def show(self, head: str, done: int, samples: int | None, details: Sequence[str], unit: str = "samples") -> None:
        """Show, unless it was shown a moment ago, that `done` of `samples` samples are done.

        Args:
            head: what is shown. The first call with another one begins another pass, and shows no rate yet.
            samples: None for a stream of unknown length.
        """
        now = time.monotonic()
        if head != self._head:  # another pass, which may be an evaluation within a training's
            self.clear()
            self._head, self._began, self._about = head, now, {"initial": done, "unit": f" {unit}"}
            if self._has_bar:
                self._bar = self._tqdm(desc=head, total=samples, leave=False, dynamic_ncols=True, **self._about)
                keep_lines_off(self._bar.clear)
        elif now >= self._next_show:
            self._next_show = now + self._interval_s
            text, passed = ", ".join(details), now - self._began
            if self._bar is not None:
                self._bar.n = done
                self._bar.set_postfix_str(text)
            else:
                print_line(self._tqdm.format_meter(done, samples, passed, 0, head, postfix=text, **self._about))

    def clear(self) -> None:
        """End the pass, and remove its bar."""
        self._head = ""
        if self._bar is not None:
            keep_lines_off(None)
            self._bar.close()
            self._bar = None

"""The line that says what `trainer doctor` is doing, on a terminal only."""

from __future__ import annotations

import sys
from types import TracebackType


class Progress:
    """A line on standard error, which is gone when the work is done."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        return self

    def show(self, text: str) -> None:
        """Replace the line."""
        self._write(f"\r\033[Ktrainer doctor: {text} …")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write("\r\033[K")

    def _write(self, text: str) -> None:
        if self._is_shown:
            sys.stderr.write(text)
            sys.stderr.flush()

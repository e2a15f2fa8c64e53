"""What a target is: a parser, the inputs that its own writer makes, and the errors that it may raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A parser that is given any bytes.

    Args:
        parse: reads an input, and checks what must hold of whatever is accepted.
        valid: inputs to begin with, made by what writes them in a job.
        refuses: the errors that are documented for inputs that are not valid.
    """

    name: str
    parse: Callable[[bytes], object]
    valid: Callable[[], Sequence[bytes]]
    refuses: tuple[type[BaseException], ...] = ()

    def run(self, data: bytes) -> None:
        """Parse an input; whatever this raises is a finding."""
        with suppress(*self.refuses):
            self.parse(data)

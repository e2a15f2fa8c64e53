"""What this build refuses, because it would load pickles that come from a network."""

from __future__ import annotations

from typing import NoReturn


def message(name: str) -> str:
    """Return one line that says what is refused, and what does the same."""
    return (
        f"{name} is left out of this Horovod, because it would load pickles from the network; take `trainer run`, "
        "or `trainer.launch` for a function"
    )


def refuse(name: str) -> NoReturn:
    """Refuse a part of Horovod.

    Raises:
        ImportError: always.
    """
    raise ImportError(message(name))

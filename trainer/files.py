"""Result files: written whole or not at all."""

from __future__ import annotations

from pathlib import Path

from trainer.errors import TrainerError


def check_writable(path: Path) -> None:
    """Check that a result can be written, before the work whose result it is.

    Raises:
        TrainerError: it cannot.
    """
    is_new = not path.exists()
    try:
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise TrainerError(f"{path} cannot be written: {error.strerror or error}") from None


def write_atomically(path: Path, text: str) -> None:
    """Write beside `path` and rename, so that neither a reader nor a crash ever leaves half a file."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)

"""What every command that measures needs: the processor's name, and a place for results."""

from __future__ import annotations

import platform
import re
from pathlib import Path

from trainer.errors import TrainerError


def cpu_model() -> str:
    """The processor's name, or the architecture's where the kernel does not say."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.machine()


def check_writable(path: Path) -> None:
    """Raises `TrainerError` where a result could not be written: before an hour of measuring, not after it."""
    is_new = not path.exists()
    try:
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise TrainerError(f"{path} cannot be written: {error.strerror or error}") from None


def write_whole(path: Path, text: str) -> None:
    """Whole or not at all: a reader never sees half a file, nor does a crash leave one."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)

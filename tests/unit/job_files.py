"""Job files for tests: rendered, and run with programs that stand in for a scheduler's."""

from __future__ import annotations

from pathlib import Path

from trainer.ops.submit.options import to_options

ROOT = Path(__file__).resolve().parent.parent.parent


def render(*arguments: str) -> str:
    """Return what `trainer submit … --dry-run` prints."""
    options = to_options(arguments)
    assert options is not None
    return options.scheduler.render(options.job)


def stand_in(folder: Path, name: str, script: str) -> None:
    """Write a program that a test puts in front of the PATH."""
    path = folder / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)

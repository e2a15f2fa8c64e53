"""Job files for tests, which run them with programs that stand in for a scheduler's."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
JOBS = ROOT / "jobs"


def stand_in(folder: Path, name: str, script: str) -> None:
    """Write a program that a test puts in front of the PATH."""
    path = folder / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)

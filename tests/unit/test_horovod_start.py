"""What horovodrun and a rank load before they start to work, as patch 0014 changes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import horovod

HOROVODRUN = Path(sys.executable).with_name("horovodrun")


def built_with(folder: Path, **notes: bool) -> dict[str, str]:
    """The environment in which the installed Horovod has another metadata.json: with these notes of the build alone."""
    package = folder / "horovod"
    package.mkdir()
    for entry in Path(horovod.__file__).parent.iterdir():
        if entry.name != "metadata.json":
            (package / entry.name).symlink_to(entry)
    (package / "metadata.json").write_text(json.dumps(notes))
    return {**os.environ, "PYTHONPATH": str(folder)}


def run(env: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=60)


def test_the_controller_is_chosen_by_what_the_build_noted(tmp_path: Path) -> None:
    done = run(
        built_with(tmp_path, mpi=False, gloo=True), str(HOROVODRUN), "-np", "1", "printenv", "HOROVOD_CONTROLLER"
    )
    assert done.stdout == "[0]<stdout>:gloo\n"


def test_a_build_without_controllers_is_said(tmp_path: Path) -> None:
    done = run(built_with(tmp_path, mpi=False, gloo=False), str(HOROVODRUN), "-np", "1", "true")
    assert done.returncode == 1
    assert done.stderr.startswith("horovodrun: Neither MPI nor Gloo support has been built.")

"""The files in jobs/ are what `trainer submit --dry-run` prints."""

from __future__ import annotations

import shlex

import pytest

from tests.unit.job_files import ROOT, render
from trainer.ops.submit.schedulers import SCHEDULERS

FILES = sorted((ROOT / "jobs").iterdir())


@pytest.mark.parametrize("name", [path.name for path in FILES])
def test_a_file_is_what_its_own_command_prints(name: str) -> None:
    text = (ROOT / "jobs" / name).read_text()
    (command,) = (line for line in text.splitlines() if line.startswith("#     trainer submit "))
    program, subcommand, *arguments = shlex.split(command.removeprefix("#"))
    assert [program, subcommand] == ["trainer", "submit"]
    assert render(*arguments) == text, f"trainer submit --dry-run prints something else than jobs/{name}"


def test_each_scheduler_has_a_file() -> None:
    assert {path.name.split(".")[0].split("-")[0] for path in FILES} == set(SCHEDULERS)


@pytest.mark.parametrize("name", [path.name for path in FILES])
def test_a_file_says_what_it_was_run_against(name: str) -> None:
    head, _, _ = (ROOT / "jobs" / name).read_text().partition("\n\n")
    assert ("# Run on 20" in head) != ("# Not run" in head)


@pytest.mark.parametrize("name", [path.name for path in FILES])
def test_a_file_names_no_other_one_to_submit(name: str) -> None:
    (line,) = (line for line in (ROOT / "jobs" / name).read_text().splitlines() if "and is submitted" in line)
    assert line.endswith(" THIS-FILE")

"""The files in jobs/ are what `trainer submit --dry-run` prints."""

from __future__ import annotations

import shlex

import pytest

from tests.unit.job_files import ROOT, render
from trainer.ops.submit.schedulers import SCHEDULERS
from trainer.ops.submit.schedulers.template import fill

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


TEMPLATE = """\
#!/bin/bash
# The time.
#SBATCH --time=__time__
# What
# __name__ needs.
#SBATCH --nodes=__nodes__
#SBATCH __directives__
spec:
  __pod__
run __name____suffix__ "$__other"
"""
VALUES = {"name": "a", "time": None, "nodes": 2, "directives": ("-p __x__", "-q"), "pod": "b:\n- c\n", "suffix": "-d"}


def test_a_template_is_filled_in() -> None:
    assert fill(TEMPLATE, VALUES).splitlines() == [
        "#!/bin/bash",
        "# What",
        "# a needs.",
        "#SBATCH --nodes=2",
        "#SBATCH -p __x__",
        "#SBATCH -q",
        "spec:",
        "  b:",
        "  - c",
        'run a-d "$__other"',
    ]


def test_a_line_without_a_value_is_left_out_with_the_comment_above_it() -> None:
    lines = fill(TEMPLATE, VALUES | {"nodes": None, "directives": None, "pod": None}).splitlines()
    assert lines == ["#!/bin/bash", "spec:", 'run a-d "$__other"']


def test_a_name_that_a_template_has_and_nobody_gives_is_a_mistake() -> None:
    with pytest.raises(KeyError, match="time"):
        fill("--time=__time__", {})

"""A failure on one rank ends the whole job, soon, with its name; a mistake costs one line and no traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.harness import Outcome, run_job
from tests.requirements import slow

SCRIPT = ["-m", "tests.distributed.job_that_fails"]
# How long a job may outlive one of its ranks, beside the time that it takes to start.
BOUND_S = 30 + 20


def our_lines(outcome: Outcome) -> list[str]:
    return [line for line in outcome.output.splitlines() if "trainer: " in line and "rank 0 of " not in line]


def run_failing(launcher: str, *arguments: str, **settings: Any) -> Outcome:
    """Run the job that fails on rank 1; check that it ended by itself, with an error, before its training did."""
    mishap, *rest = arguments
    outcome = run_job(launcher, 2, [*SCRIPT, mishap, "1", *rest], timeout_s=BOUND_S, **settings)
    assert not outcome.timed_out, f"it outlived its rank:\n{outcome.output}"
    assert outcome.code != 0, outcome.output
    assert "the epoch ended" not in outcome.output
    return outcome


# Under each launcher one rank ends in one of the next three tests: with a bug, with a mistake, without a word.
@pytest.mark.parametrize("launcher", ["horovodrun-gloo", slow("horovodrun-mpi"), slow("torchrun")])
def test_a_bug_on_one_rank_ends_the_job(launcher: str) -> None:
    outcome = run_failing(launcher, "bug")
    assert "rank 1 on host" in outcome.output
    assert "ZeroDivisionError: the user's own bug" in outcome.output
    assert "Traceback" in outcome.output


@pytest.mark.parametrize("launcher", ["torchrun", slow("horovodrun-mpi"), slow("horovodrun-gloo")])
def test_a_mistake_on_one_rank_ends_the_job_without_a_traceback(launcher: str) -> None:
    outcome = run_failing(launcher, "mistake")
    assert any("rank 1 on host" in line and "sample 7" in line for line in our_lines(outcome)), outcome.output
    assert "job_that_fails.py" not in outcome.output.replace("job_that_fails.py FAILED", "")


@pytest.mark.parametrize("launcher", ["horovodrun-mpi", slow("torchrun"), slow("horovodrun-gloo")])
def test_a_rank_that_leaves_early_does_not_hang_the_others(launcher: str) -> None:
    run_failing(launcher, "exit")


@pytest.mark.slow  # it is an example
@pytest.mark.parametrize("launcher", ["torchrun", "horovodrun-mpi", "horovodrun-gloo"])
def test_a_parameter_server_names_the_rank_that_hangs(launcher: str) -> None:
    outcome = run_failing(launcher, "hang", "parameter_server", env={"TRAINER_PARAMETER_SERVER_TIMEOUT_S": "3"})
    assert any("rank 1 on host" in line and "did not send" in line for line in our_lines(outcome)), outcome.output


def test_a_mistake_that_all_ranks_make_is_one_line(tmp_path: Path) -> None:
    output = tmp_path / "run"
    options = ["--dataset", "digits", "--output", str(output), "--strategy", "single"]
    outcome = run_job("horovodrun-mpi", 2, ["examples/mnist.py", "--device", "cpu", *options])
    assert outcome.code not in (0, 124)
    said = [line for line in our_lines(outcome) if "strategy 'single' trains alone" in line]
    assert len(said) == 1, outcome.output
    assert "Traceback" not in outcome.output
    assert not output.exists()

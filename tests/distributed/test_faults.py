"""A training that loses a rank, its launcher or its supervisor ends as if nothing had happened: a trial of each fault.

`benchmarks/faults.py` is the long form.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks import faults
from tests.faults.job_faults import FAULTS, Plan
from tests.faults.job_trials import LAUNCHERS, Trial, Trials, draw

pytestmark = pytest.mark.timeout(300)

# The default run has each way of ending in one form. These end a rank, as "killed during a save" does; `test_hangs`
# has a rank that is stopped, `test_supervise` a launcher that is killed, `test_launch` a caller of it, and
# `test_checkpoints` a notice of preemption.
VARIANTS = (
    *("SIGKILL to a rank", "SIGSTOP to a rank", "exception", "launcher killed", "killed before the first update"),
    *("supervisor killed", "SIGUSR2 to the supervisor"),
)


def pairs() -> list[Any]:
    """Each fault under one launcher in turn."""
    found = []
    for number, fault in enumerate(sorted(FAULTS, key=VARIANTS.__contains__)):
        marks = [pytest.mark.slow] if fault in VARIANTS else []
        if fault == "disk full, then killed":
            marks.append(pytest.mark.needs("root"))
        launcher = LAUNCHERS[number % len(LAUNCHERS)]
        found.append(pytest.param(fault, launcher, marks=marks, id=f"{fault.replace(' ', '-')}-{launcher}"))
    return found


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(tmp_path_factory.mktemp("trials"))


@pytest.mark.parametrize(("fault", "launcher"), pairs())
def test_no_fault_loses_a_sample_or_changes_the_weights(trials: Trials, fault: str, launcher: str) -> None:
    trial = trials.run(draw(fault, launcher, random.Random(fault)))
    assert not trial.problems, f"{trial.plan}: {trial.problems}; see {trial.folder}"
    assert trial.recovery_s is not None
    assert trial.recovery_s > 0


def test_the_table_has_a_row_for_each_fault_and_one_for_all() -> None:
    one = Trial("mpi", Plan(fault="exception"), recovery_s=3.0)
    other = Trial("gloo", Plan(fault="exception"), recovery_s=5.0, problems=["lost"], is_lost=True, left=2)
    killed = Trial("gloo", Plan(fault="launcher killed"))
    table = faults.table([one, other, killed]).splitlines()
    assert table[2] == "| exception | 2 | 1 | 4.0 | 5.0 | 1 | 2 |"
    assert table[3] == "| launcher killed | 1 | 1 | – | – | 0 | 0 |"
    assert table[4] == "| **all** | 3 | 2 | 4.0 | 5.0 | 1 | 2 |"


def test_each_fault_comes_as_often_as_any_other() -> None:
    found = list(faults.plan(["exception", "launcher killed"], LAUNCHERS, 12, seed=0))
    assert len({(trial.plan.fault, trial.launcher) for trial in found}) == 6
    assert len({(trial.plan.fault, trial.launcher) for trial in found[:6]}) == 6
    assert found == list(faults.plan(["exception", "launcher killed"], LAUNCHERS, 12, seed=0))

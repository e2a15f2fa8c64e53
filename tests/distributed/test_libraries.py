"""Libraries that ask torch.distributed whether they are alone, under every launcher; srun's are in test_srun.py."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.launching import PEERS
from tests.distributed.harness import run_job

pytestmark = pytest.mark.needs("peers")


def check_libraries(launcher: str, *options: str, env: Mapping[str, str] | None = None) -> None:
    script = ["tests/distributed/job_with_libraries.py", *options]
    outcome = run_job(
        launcher, 2, script, env={"OMP_NUM_THREADS": "1"} | dict(env or {}), python=str(PEERS / "bin/python")
    )
    assert outcome.code == 0, outcome.output
    [line] = [line for line in outcome.output.splitlines() if "[(" in line]
    found = ast.literal_eval(line[line.index("[(") :])
    assert found == [
        (pytest.approx(4 / 7), ["0", "2"], 4.0, "0", True),
        (pytest.approx(4 / 7), ["1", "3"], 8.0, "1", True),
    ]


@pytest.mark.parametrize("launcher", ["horovodrun-mpi", "horovodrun-gloo", "mpirun", "torchrun"])
def test_metrics_datasets_and_collectives_see_all_ranks(launcher: str) -> None:
    check_libraries(launcher)


def test_strategies_of_ones_own_have_the_group_as_well() -> None:
    check_libraries("mpirun", env={"TRAINER_TEST_STRATEGY": "examples.strategies.ring:RingStrategy"})


def test_a_group_that_the_script_has_made_is_taken(tmp_path: Path) -> None:
    check_libraries("horovodrun-mpi", "--own-group", env={"TRAINER_TEST_STORE": str(tmp_path / "store")})

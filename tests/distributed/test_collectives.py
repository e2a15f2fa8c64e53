"""The example of all calls: every one of them is there, and right, with each library."""

from __future__ import annotations

import re

import pytest

from examples.collectives import MEANINGS
from tests.distributed.harness import run_job

pytestmark = pytest.mark.distributed
SCRIPT = ["examples/collectives.py", "--device", "cpu"]


@pytest.mark.parametrize(
    ("launcher", "ranks", "libraries"),
    [("horovodrun-mpi", 3, {"MPI", "Gloo"}), ("mpirun", 4, {"MPI", "Gloo"}), ("torchrun", 2, {"Gloo"})],
)
def test_every_call_is_right(launcher: str, ranks: int, libraries: set[str]) -> None:
    outcome = run_job(launcher, ranks, SCRIPT)
    assert outcome.code == 0, outcome.output
    shown = set(re.findall(r"(\w+) (\w+): .*, all ranks right", outcome.output))
    assert shown == {(library, call) for library in libraries for call in MEANINGS}
    assert ("MPI: left out" in outcome.output) == ("MPI" not in libraries)
    assert "Warning" not in outcome.output


def test_one_rank_alone_is_told_so() -> None:
    outcome = run_job("python", 1, SCRIPT)
    assert outcome.code == 1
    assert outcome.output.startswith("trainer: one rank has nobody to talk to")

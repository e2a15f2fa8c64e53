"""The example of all calls: every one of them is there, and right, with each library."""

from __future__ import annotations

import re
import sys

import pytest

from examples import collectives
from tests.distributed.harness import run_job
from tests.requirements import slow
from trainer import ConfigError

SCRIPT = ["examples/collectives.py", "--device", "cpu"]


@pytest.mark.parametrize(
    ("launcher", "ranks", "libraries"),
    [("horovodrun-mpi", 3, {"MPI", "Gloo"}), slow("torchrun", 2, {"Gloo"}), slow("mpirun", 4, {"MPI", "Gloo"})],
)
def test_every_call_is_right(launcher: str, ranks: int, libraries: set[str]) -> None:
    outcome = run_job(launcher, ranks, SCRIPT)
    assert outcome.code == 0, outcome.output
    shown = set(re.findall(r"(\w+) (\w+): .*, all ranks right", outcome.output))
    assert shown == {(library, call) for library in libraries for call in collectives.MEANINGS}
    assert ("MPI: left out" in outcome.output) == ("MPI" not in libraries)
    assert "Warning" not in outcome.output


def test_one_rank_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["collectives.py", "--device", "cpu"])
    with pytest.raises(ConfigError, match=r"^collectives need two ranks or more"):
        collectives.main()

"""The store of torchrun's agents asks nobody who they are: whether what an intruder writes there is run."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.security.attacks import overwrite_store
from tests.security.running import running
from trainer.ops.supervise.hosts import Host
from trainer.ops.supervise.launchers import environment_for, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]
PROGRAM = ["sleep", "15"]
_ATTACKED_S = 7.0  # an agent looks at its state every five seconds


def attack(command: list[str], marker: Path) -> int:
    """Attack a job for some seconds, or until the file is there; return how many keys were there to be written."""
    written = 0
    with running(command) as job:
        port = job.wait_for_port()
        deadline = time.monotonic() + _ATTACKED_S
        while time.monotonic() < deadline and not marker.exists():
            written += overwrite_store(port, marker)
            time.sleep(1)
    return written


def test_an_agent_on_one_host_that_is_given_no_port_runs_what_is_in_the_store(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--no-python", *PROGRAM]
    assert attack(command, tmp_path / "marker") > 0
    assert (tmp_path / "marker").exists()


def test_the_agents_of_trainer_run_which_are_given_one_do_not(tmp_path: Path) -> None:
    (start,) = torchrun([Host("localhost", 1)], PROGRAM, environment_for("one"))
    assert attack(list(start.command), tmp_path / "marker") == 0
    assert not (tmp_path / "marker").exists()

"""A rank leaves the session of its launcher where that is safe, and only there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.tuning import session

pytestmark = pytest.mark.skipif(os.nice(0) != 0, reason="nice processes stay in their session")

# What each process does before it asks for a session, after it has been made a child of a session of its own.
LEADS_ITS_GROUP = "os.setpgid(0, 0)"
IS_IN_ITS_PARENTS_GROUP = ""
LEADS_A_SESSION = "os.setsid()"
IGNORES_ITS_CHILDRENS_ENDS = "os.setpgid(0, 0); signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
IS_NICE = "os.setpgid(0, 0); os.nice(1)"
IS_A_JOB_OF_PBS = "os.setpgid(0, 0); os.environ['PBS_JOBID'] = '1'"
HAS_A_CHILD_IN_ITS_GROUP = "os.setpgid(0, 0); child = subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL)"

SCRIPT = """
import importlib.util, json, os, signal, subprocess, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("session", sys.argv[1])
session = importlib.util.module_from_spec(spec); spec.loader.exec_module(session)
session._AUTOGROUP = Path(sys.argv[2])
child = None
if (rank := os.fork()) == 0:
    {before}
    session_before = os.getsid(0)
    took = session.take_own_session()
    if child:
        child.kill()
    print(json.dumps([took, os.getsid(0) == os.getpid(), os.getsid(0) == session_before, os.getpgrp() == os.getpid()]))
    sys.exit()
os.waitpid(rank, 0)
"""


@pytest.fixture
def autogroup(tmp_path: Path) -> Path:
    path = tmp_path / "sched_autogroup_enabled"
    path.write_text("1\n")
    return path


def ask(before: str, autogroup: Path, **options: Any) -> list[bool]:
    """Return whether it took a session, leads one, is in the one from before, and leads its group."""
    command = [sys.executable, "-S", "-c", SCRIPT.format(before=before), str(session.__file__), str(autogroup)]
    options = {"stdin": subprocess.DEVNULL, "start_new_session": True, **options}
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True, **options)
    found: list[bool] = json.loads(done.stdout)
    return found


def test_who_leads_its_group_gets_a_session_and_keeps_the_groups_number(autogroup: Path) -> None:
    assert ask(LEADS_ITS_GROUP, autogroup) == [True, True, False, True]


@pytest.mark.parametrize(
    ("before", "leads_session", "leads_group"),
    [
        (IS_IN_ITS_PARENTS_GROUP, False, False),
        (LEADS_A_SESSION, True, True),
        (HAS_A_CHILD_IN_ITS_GROUP, False, True),
        (IGNORES_ITS_CHILDRENS_ENDS, False, True),
        (IS_NICE, False, True),
        (IS_A_JOB_OF_PBS, False, True),
    ],
)
def test_others_stay_where_they_are(before: str, leads_session: bool, leads_group: bool, autogroup: Path) -> None:
    assert ask(before, autogroup) == [False, leads_session, True, leads_group]


def test_who_has_a_terminal_stays_in_its_session(autogroup: Path) -> None:
    controller, terminal = os.openpty()
    try:
        assert ask(LEADS_ITS_GROUP, autogroup, stdin=terminal) == [False, False, True, True]
    finally:
        os.close(controller)
        os.close(terminal)

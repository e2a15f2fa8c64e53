"""`trainer run`: what ends a job, what is started again, and that nothing is left of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.distributed.harness import ROOT, kill_job, marked_environment, processes_of, wait_until
from tests.terminal import Session, run_on_terminal

pytestmark = pytest.mark.timeout(150)

WATCHED = "tests.distributed.job_that_is_watched"
SCRIPT = ROOT / "tests" / "distributed" / "job_that_is_killed.py"
DEADLINE_S = 90.0


@dataclass(frozen=True)
class Ended:
    """How `trainer run` has ended."""

    code: int
    output: str
    events: list[dict[str, Any]]

    def attempts(self) -> list[dict[str, Any]]:
        """Return the ends of the last call's attempts."""
        first = max(number for number, event in enumerate(self.events) if event.get("attempt") == 1)
        return [event for event in self.events[first:] if "recovery_s" in event]


class Supervised:
    """Calls of `trainer run` in a folder of their own, which is also the mark of all their processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._log = folder / "log"
        self.environment = marked_environment(folder)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "trainer", "run", *arguments], cwd=self.folder, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, env=self.environment,
            )  # fmt: skip

    def wait(self, process: subprocess.Popen[bytes]) -> Ended:
        code = process.wait(timeout=DEADLINE_S)
        output = self._log.read_text(errors="replace")
        assert self.running() == [], f"processes are left:\n{output}"
        assert not list((self.folder / "tmp").glob("trainer-*")), "status files are left"
        events = (self.folder / "runs" / "job_that_is_killed" / "events.jsonl").read_text()
        return Ended(code, output, [json.loads(line) for line in events.splitlines()])

    def run(self, *arguments: str) -> Ended:
        return self.wait(self.start(*arguments))

    def running(self) -> list[str]:
        """Return the commands of the processes that are left. One that is killed takes a moment to go."""
        _, left = psutil.wait_procs(processes_of(str(self.folder)), timeout=1.0)
        return [" ".join(process.cmdline()) for process in left]

    def wait_for(self, what: Callable[[], object]) -> None:
        wait_until(what, DEADLINE_S, lambda: self._log.read_text(errors="replace"))

    def has_saved(self) -> bool:
        with suppress(OSError):
            return bool(json.loads((self.folder / "progress.json").read_text())["update"])
        return False


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervised]:
    calls = Supervised(tmp_path)
    yield calls
    kill_job(str(tmp_path))


def command(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, str(SCRIPT), *arguments)


def test_a_job_that_loses_its_launcher_goes_on(supervised: Supervised) -> None:
    """test_faults.py has more."""
    ended = supervised.run("-np", "2", "--mpi", *command("launcher"))
    assert ended.code == 0, ended.output
    first, second = ended.attempts()
    assert first["event"] == "failed"
    assert first["end"].startswith("horovodrun has ended with code 137 (SIGKILL)")
    assert second["event"] == "done"
    assert second["updates"][0] in (11, 21)
    assert second["updates"][1] == 40
    assert 0 < second["recovery_s"]["total"] < 30
    assert "in start 2" in ended.output


def test_ranks_end_where_their_launcher_is_killed_and_trainer_run_too(supervised: Supervised) -> None:
    """torchrun's: the other launchers' end by themselves."""
    process = supervised.start("-np", "2", "--torchrun", *command("none", "--updates", "9999"))
    supervised.wait_for(supervised.has_saved)
    (launcher,) = psutil.Process(process.pid).children()
    for each in (psutil.Process(process.pid), launcher):
        each.kill()
    process.wait()
    wait_until(lambda: not processes_of(str(supervised.folder)), 5.0, lambda: "ranks go on without their launcher")


def test_a_users_mistake_is_not_tried_again(supervised: Supervised) -> None:
    ended = supervised.run("-np", "2", "--mpi", *command("mistake", "--rank", "0"))
    assert ended.code == 78, ended.output
    assert [event["event"] for event in ended.events] == ["start", "mistake", "end"]
    assert "trainer run: attempt 1: rank 0 on localhost: momentum is 2; valid is 0 to 1\n" in ended.output
    assert "Primary job" not in ended.output  # nor mpirun's other banner
    assert "mpirun detected" not in ended.output


def test_a_job_goes_on_without_a_host_that_is_lost(supervised: Supervised) -> None:
    hosts = ("-H", "localhost:1,no-such-host.invalid:1", "-np", "2")
    ended = supervised.run("--torchrun", *hosts, "--min-np", "1", *command("none"))
    assert ended.code == 0, ended.output
    first, second = ended.attempts()
    assert first["end"].startswith("host no-such-host.invalid is lost: ")
    assert (second["hosts"], second["event"]) == ("localhost:1", "done")


def test_too_few_hosts_are_waited_for_and_then_named(supervised: Supervised) -> None:
    hosts = ("-H", "localhost:1,no-such-host.invalid:1", "-np", "2")
    ended = supervised.run("--torchrun", *hosts, "--wait-for-hosts", "1", *command("none"))
    assert ended.code == 1, ended.output
    assert "1 of at least 2 slots are left: no-such-host.invalid does not answer" in ended.events[-1]["text"]


def test_torchrun_takes_no_option_of_the_scripts_for_its_own(supervised: Supervised) -> None:
    own = ["--log", "INFO", "--r", "3", "--np=2", "--", "--n", "4"]
    (supervised.folder / "train.py").write_text("import sys; print(sys.argv[1:])")
    run = ("-np", "2", "--torchrun", "--name", "job_that_is_killed")
    ended = supervised.run(*run, sys.executable, "train.py", *own)
    assert ended.code == 0, ended.output
    assert ended.output.count(str(own)) == 2


def test_ctrl_c_is_as_with_the_launcher_alone(supervised: Supervised) -> None:
    """The terminal sends Ctrl-C to the launcher and to `trainer run` at once."""
    sent: list[float] = []

    def interrupt(session: Session, terminal: int) -> None:
        if "is at step" in session.text and not sent:
            sent.append(time.monotonic())
            os.write(terminal, b"\x03")

    session = run_on_terminal(
        [sys.executable, "-m", "trainer", "run", "-np", "2", "--mpi", sys.executable, "-m", WATCHED],
        env=supervised.environment, cwd=supervised.folder, timeout_s=DEADLINE_S, on_change=interrupt,
    )  # fmt: skip
    assert sent, session.text
    assert session.code == 130, session.text
    assert time.monotonic() - sent[0] < 15
    assert "trainer run: attempt 1: interrupted" in session.text
    assert supervised.running() == []

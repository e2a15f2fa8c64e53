"""What ends a job with horovodrun: signals, a terminal's Ctrl-C, and the client of `docker exec`."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from horovod.runner.util import supervise

pytestmark = pytest.mark.distributed

HOROVODRUN = Path(sys.executable).with_name("horovodrun")
# A program that runs the rest of its command line under supervision, and says how it ended.
SUPERVISED = """
import os, shlex, sys
from horovod.runner.util import supervise
try:
    print("code", supervise.run(shlex.join(sys.argv[1:]), os.environ.copy()), flush=True)
except supervise.EndedError as ended:
    print(ended, ended.exit_code, flush=True)
"""
FOLLOWING = """
import sys, time
from horovod.runner.util import supervise
supervise.EMPTY_STDIN_S = 0.5
print("ready", flush=True)
supervise.end_with_client(sys.stdout.buffer)
sys.__stderr__.write("goes on")
"""


def start(program: str, *command: str, stdin: int | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *command],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pid_in_first_line(process: subprocess.Popen[str]) -> psutil.Process:
    assert process.stdout is not None
    return psutil.Process(int(process.stdout.readline()))


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -KILL $$", 137)])
def test_the_exit_code_is_handed_on_as_a_shell_tells_it(script: str, code: int) -> None:
    with start(SUPERVISED, "sh", "-c", script) as process:
        assert process.communicate(timeout=20)[0] == f"code {code}\n"


@pytest.mark.parametrize(
    ("number", "line"),
    [
        (signal.SIGINT, "interrupted 130\n"),
        (signal.SIGTERM, "ended by SIGTERM 143\n"),
        (signal.SIGHUP, "ended by SIGHUP 129\n"),
    ],
)
def test_a_signal_is_handed_on(number: signal.Signals, line: str) -> None:
    with start(SUPERVISED, "sh", "-c", "echo $$; exec sleep 60") as process:
        child = pid_in_first_line(process)
        process.send_signal(number)
        assert process.communicate(timeout=20)[0] == line
        assert not child.is_running()


def test_a_signal_is_handed_on_once() -> None:
    script = "trap 'echo INT' INT; trap 'echo TERM' TERM; echo $$; for i in 1 2 3 4 5 6; do sleep 0.2; done; exit 3"
    with start(SUPERVISED, "sh", "-c", script) as process:
        pid_in_first_line(process)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=20)[0] == "INT\ninterrupted 130\n"


def test_what_is_ignored_stays_ignored() -> None:
    program = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)" + SUPERVISED
    # Which itself does not ignore it, as mpirun does not.
    child = "import os, signal, time; signal.signal(1, signal.SIG_DFL); print(os.getpid(), flush=True); time.sleep(0.5)"
    with start(program, sys.executable, "-c", child) as process:
        pid_in_first_line(process)
        process.send_signal(signal.SIGHUP)
        assert process.communicate(timeout=20)[0] == "code 0\n"


def test_a_message_of_the_scheduler_is_handed_on_and_ends_nothing() -> None:
    script = "trap 'echo told' USR2; echo $$; for i in 1 2 3 4 5 6; do sleep 0.2; done; exit 3"
    with start(SUPERVISED, "sh", "-c", script) as process:
        pid_in_first_line(process)
        process.send_signal(signal.SIGUSR2)
        assert process.communicate(timeout=20)[0] == "told\ncode 3\n"


def test_a_killed_supervisor_ends_the_launcher() -> None:
    with start(SUPERVISED, "sh", "-c", "echo $$; exec sleep 60") as process:
        child = pid_in_first_line(process)
        process.kill()
        child.wait(timeout=20)


@pytest.mark.parametrize("controller", ["--mpi", "--gloo"])
def test_ctrl_c_is_one_line(controller: str) -> None:
    command = [sys.executable, str(HOROVODRUN), controller, "-np", "2", "sh", "-c", "echo started; exec sleep 60"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(command[0], command)  # noqa: S606 (as a terminal starts it)
    seen = ""
    try:
        while seen.count("started") < 2:
            seen += os.read(terminal, 4096).decode()
        os.write(terminal, b"\x03")
        while True:  # until the other end is closed
            seen += os.read(terminal, 4096).decode()
    except OSError:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    finally:
        os.close(terminal)
    assert seen.partition("^C")[2].strip() == "horovodrun: interrupted"


def test_a_client_that_goes_ends_the_job() -> None:
    with start(FOLLOWING, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.8)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == -signal.SIGTERM
        assert errors.startswith("horovodrun: stdin has ended, as it does when the client outside this container has")


def test_what_a_shell_has_on_stdin_is_left_to_it() -> None:
    """Over Gloo no launcher reads stdin, and `docker exec -i a sh < job.sh` has the rest of the script there."""
    program = FOLLOWING.replace("sys.stdout.buffer", "") + "time.sleep(0.7); sys.stdout.write(sys.stdin.read())"
    with start(program, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write("the rest")
        process.stdin.flush()
        time.sleep(1.0)
        assert process.communicate(timeout=20) == ("ready\nthe rest", "goes on")
    with start(FOLLOWING.replace("sys.stdout.buffer", ""), stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.8)
        process.communicate(timeout=20)
        assert process.returncode == -signal.SIGTERM  # nothing was ever written to it


@pytest.mark.parametrize(("words", "open_s"), [("", 0.0), ("all\nof it", 0.8)], ids=["empty stdin", "input"])
def test_a_stdin_that_was_empty_or_is_used_may_end(words: str, open_s: float) -> None:
    with start(FOLLOWING, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        if open_s:
            assert process.stdout.readline() == "ready\n"
            process.stdin.write(words)
            process.stdin.flush()
            time.sleep(open_s)
        output, errors = process.communicate(timeout=20)
        assert (process.returncode, errors) == (0, "goes on")
        assert output.removeprefix("ready\n") == words


class Ancestor:
    """A process in a tree of three, of which the first has its parent outside this container."""

    def __init__(self, pid: int = 3) -> None:
        self.pid = pid

    def ppid(self) -> int:
        return 0

    def parents(self) -> list[Ancestor]:
        return [Ancestor(2), Ancestor(os.getpid())]


def test_only_a_pipe_from_outside_the_container_is_a_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    kept = os.dup(0)
    try:
        os.dup2(reader, 0)
        assert not supervise.has_exec_client()  # nothing here has come from outside
        monkeypatch.setattr(psutil, "Process", Ancestor)
        assert supervise.has_exec_client()
        monkeypatch.setattr(Ancestor, "ppid", lambda _: 1)
        assert not supervise.has_exec_client()
        monkeypatch.setattr(Ancestor, "ppid", lambda _: 0)
        monkeypatch.setattr(Ancestor, "parents", lambda _: [Ancestor(1)])
        assert not supervise.has_exec_client()  # the container's own first process
        with Path(os.devnull).open() as nothing:
            os.dup2(nothing.fileno(), 0)
        monkeypatch.setattr(Ancestor, "parents", lambda _: [Ancestor(os.getpid())])
        assert not supervise.has_exec_client()
    finally:
        os.dup2(kept, 0)
        for one in (kept, reader, writer):
            os.close(one)

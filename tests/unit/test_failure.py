"""How a failing process ends: one line for a mistake, a traceback for a bug, and never an exit that waits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

import pytest

from tests.distributed.harness import ROOT
from trainer.cluster.environment import Launch
from trainer.errors import ConfigError, DataError, TrainerError, name_rank
from trainer.watch import failure

# The handler that is called last stands for Horovod's, which waits for ranks that wait for this one.
SCRIPT = """
import atexit, os, signal, sys, time
from trainer.errors import TrainerError
from trainer.watch.failure import at_exit, report_failures
at_exit(lambda: print("left the job"))
atexit.register(print, "logged the rest")
report_failures()
sys.stdout.write("printed before, ")
{failure}
"""
FAILURES = {
    "mistake": "raise TrainerError('the disk is full')",
    "bug": "1 / 0",
    # A shell that starts something in the background makes it ignore this signal, and its children too.
    "interrupt": "signal.signal(signal.SIGINT, signal.default_int_handler); "
    "os.kill(os.getpid(), signal.SIGINT); time.sleep(20)",
    "closed output": "raise TrainerError('the disk is full')",
    "nothing": "",
    "hang at exit": "atexit.register(time.sleep, 60); raise TrainerError('the disk is full')",
    "other hook": "sys.excepthook = lambda kind, *_: print('the hook has seen', kind.__name__); "
    "report_failures(); 1 / 0",
    "hook around": "ours = sys.excepthook; sys.excepthook = lambda *error: (print('around'), ours(*error)); "
    "report_failures(); 1 / 0",
}

Results = dict[str, subprocess.CompletedProcess[str]]


# Runs every script in a process that is forked when everything has been imported, which takes seconds.
EACH = """
import json, os, sys
import trainer.errors, trainer.watch.failure
scripts, children = json.loads(sys.argv[1]), {}
for kind, script in scripts.items():
    children[kind] = os.fork()
    if children[kind] == 0:
        reader, writer = os.pipe()
        os.close(reader)
        out, err = (os.open(f"{kind}.{name}", os.O_WRONLY | os.O_CREAT) for name in ("out", "err"))
        os.dup2(writer if kind == "closed output" else out, 1)
        os.dup2(err, 2)
        exec(script)
        break
else:
    print(json.dumps({kind: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for kind, child in children.items()}))
"""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def ended(logs: Path) -> Results:
    """Every failure in a process of its own."""
    # Python keeps back what it prints into a file, unless the environment says otherwise.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    scripts = {kind: SCRIPT.format(failure=body) for kind, body in FAILURES.items()}
    done = subprocess.run(
        [sys.executable, "-c", EACH, json.dumps(scripts)],
        capture_output=True, text=True, cwd=logs, env=environment, timeout=120, check=True,
    )  # fmt: skip
    return {
        kind: subprocess.CompletedProcess(
            kind, code, (logs / f"{kind}.out").read_text(), (logs / f"{kind}.err").read_text()
        )
        for kind, code in json.loads(done.stdout).items()
    }


KEPT = "printed before, logged the rest\n"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "code", "stdout", "last"),
    [
        ("mistake", 1, KEPT, "trainer: the disk is full"),
        ("bug", 1, KEPT, "trainer: ZeroDivisionError: division by zero"),
        ("interrupt", 130, KEPT, "trainer: interrupted"),
        ("hang at exit", 1, None, "trainer: the disk is full"),
        # A hook that was there before is called for a bug, and one around the library's once.
        ("other hook", 1, "printed before, the hook has seen ZeroDivisionError\nlogged the rest\n", None),
        ("hook around", 1, "printed before, around\nlogged the rest\n", "trainer: ZeroDivisionError: division by zero"),
        ("nothing", 0, f"{KEPT}left the job\n", ""),
        # As in `train.py | head`: what was printed cannot be written any more.
        ("closed output", 1, "", "trainer: the disk is full"),
    ],
)
def test_how_a_process_ends(ended: Results, kind: str, code: int, stdout: str | None, last: str | None) -> None:
    """What was printed or logged is kept, other ranks are not waited for, and exit handlers have a bounded time."""
    done = ended[kind]
    lines = done.stderr.splitlines()
    assert done.returncode == code
    assert stdout is None or done.stdout == stdout
    assert last is None or [*lines, ""][max(0, len(lines) - 1)] == last
    has_traceback = kind in ("bug", "hook around")
    assert (lines[:1] == ["Traceback (most recent call last):"]) == has_traceback
    assert has_traceback or len(lines) <= 1


@pytest.mark.distributed
def test_horovods_own_exit_handler_is_left_out() -> None:
    """It waits for ranks that wait for this one; what was registered before it would come after it, or never."""
    script = (
        "import atexit, horovod.torch as hvd, trainer; "
        "atexit.register(lambda: print('Horovod still runs:', hvd.is_initialized())); "
        "trainer.init('horovod', device='cpu'); raise ValueError('night')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "Horovod still runs: True\n"
    assert done.returncode == 1


class Ending:
    """What a rank does at its end, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.slept: list[float] = []
        self._sleep, self._thread = time.sleep, threading.current_thread()
        monkeypatch.setattr("trainer.watch.failure.time.sleep", self._note_sleep)
        # They would end this process's libraries.
        monkeypatch.setattr("trainer.watch.failure._run_exit_handlers", lambda: None)
        monkeypatch.setattr("trainer.watch.failure.os._exit", self._exit)
        monkeypatch.setattr("trainer.watch.failure.socket.gethostname", lambda: "node7")

    def _note_sleep(self, seconds: float) -> None:
        if threading.current_thread() is self._thread:
            self.slept.append(seconds)
        else:  # a thread that an earlier test has left: `time` is the whole process's
            self._sleep(seconds)

    def _exit(self, code: int) -> None:
        raise SystemExit(code)

    def of(self, error: BaseException, *, rank: int, size: int = 2, trace: TracebackType | None = None) -> int:
        launch = Launch(launcher="mpirun", rank=rank, size=size, local_rank=rank, local_size=size)
        self._monkeypatch.setattr(failure, "read_launch", lambda: launch)
        with pytest.raises(SystemExit) as ended:
            failure._end_job(type(error), error, trace)
        assert isinstance(ended.value.code, int)
        return ended.value.code


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Ending:
    return Ending(monkeypatch)


LOST = "rank 1 on host node7: lost another rank, and with it the job"
GLOO = "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:5"
RESET = ConnectionResetError("Connection reset by peer")


class HorovodInternalError(RuntimeError):
    """As Horovod's."""


HOROVOD = HorovodInternalError("Horovod has been shut down.")


def chained(error: BaseException, other: BaseException, *, is_cause: bool = False) -> BaseException:
    """Return `other` as Python raises it within the `except` of `error`, with its traceback."""
    try:
        try:
            raise error
        except type(error):
            raise other from (error if is_cause else None)
    except type(other) as caught:
        caught.__suppress_context__ = is_cause
        return caught


KILLED = "DataLoader worker (pid 7) is killed by signal: Killed."


@pytest.mark.parametrize(
    ("first", "second", "is_lost"),
    [
        # A signal's handler, in the midst of a wait of Horovod's, or anywhere.
        (RuntimeError(KILLED), HorovodInternalError(KILLED), False),
        # What is raised because a rank is lost: on purpose, or as its error is handled.
        (HorovodInternalError("shut down"), RuntimeError("no epoch 3"), True),
        (RuntimeError(GLOO), OSError("disk full"), True),
        (KeyError("x"), HorovodInternalError("shut down"), True),
        (KeyError("x"), ValueError("y"), False),
    ],
)
def test_a_lost_rank_is_told_by_the_chain_of_errors(first: Exception, second: Exception, is_lost: bool) -> None:
    assert failure.is_lost_peer(chained(first, second)) == is_lost
    assert failure.is_lost_peer(chained(first, second, is_cause=True)) == is_lost


def test_an_error_of_a_signals_handler_is_the_one_that_is_told(
    ending: Ending, capfd: pytest.CaptureFixture[str]
) -> None:
    """A loader's, which comes a moment after its worker was killed and has let go of its connections."""

    def tell(number: int, frame: object) -> None:
        raise RuntimeError(KILLED)

    earlier = signal.signal(signal.SIGCHLD, tell)
    subprocess.Popen(["sleep", "0.01"])
    try:
        assert ending.of(RESET, rank=1) == 1
    finally:
        signal.signal(signal.SIGCHLD, earlier)
    assert capfd.readouterr().err.splitlines()[-1] == f"trainer: rank 1 on host node7: RuntimeError: {KILLED}"


FIRST, PEER = failure._LET_RANK_0_PRINT_FIRST_S, failure._LET_PEER_PRINT_FIRST_S


@pytest.mark.parametrize(
    ("error", "rank", "size", "code", "last", "slept"),
    [
        (TrainerError("the disk is full"), 0, 2, 1, "rank 0 on host node7: the disk is full", []),
        # A rank that a message names is named once.
        (TrainerError(name_rank("full", rank=1, size=2, host="node8")), 0, 2, 1, "rank 1 on host node8: full", []),
        # A user's mistake has its own code, and rank 0 prints a common one first.
        (ConfigError("batch_size is 0"), 0, 2, 78, "rank 0 on host node7: batch_size is 0", []),
        (DataError("damaged labels"), 1, 2, 78, "rank 1 on host node7: damaged labels", [FIRST]),
        (KeyboardInterrupt(), 0, 2, 130, "interrupted", []),
        (KeyboardInterrupt(), 1, 2, 130, "", []),
        # A rank that has lost its peer lets it print first.
        (HOROVOD, 1, 2, 1, f"{LOST} (HorovodInternalError)", [PEER]),
        (RuntimeError(GLOO), 1, 2, 1, f"{LOST} (RuntimeError)", [PEER]),
        # A connection of the user's that is lost keeps its traceback, and a world of 1 has no peer to lose.
        (RESET, 1, 2, 1, "rank 1 on host node7: ConnectionResetError: Connection reset by peer", []),
        (RESET, 0, 1, 1, "ConnectionResetError: Connection reset by peer", []),
        (IndexError("index"), 1, 2, 1, "rank 1 on host node7: IndexError: index", []),
    ],
)
def test_what_a_failing_rank_prints_and_when(
    ending: Ending, capfd: pytest.CaptureFixture[str], error: BaseException, rank: int, size: int, code: int,
    last: str, slept: list[float],
) -> None:  # fmt: skip
    assert ending.of(error, rank=rank, size=size) == code
    lines = capfd.readouterr().err.splitlines()
    assert [*lines, ""][max(0, len(lines) - 1)] == (f"trainer: {last}" if last else "")
    assert len(lines) <= 1 or error is RESET or isinstance(error, IndexError)
    assert ending.slept == slept

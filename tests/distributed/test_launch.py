"""`trainer.launch` through the real launchers: results, exceptions, restarts, and that nothing is left of it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import trainer
from benchmarks.launching import PEERS
from tests import requirements
from tests.distributed.harness import ROOT, kill_job, marked_environment, processes_of, wait_until
from tests.distributed.pages import Unit, launching_units
from tests.terminal import Session, run_on_terminal

pytestmark = pytest.mark.timeout(150)

SCRIPT = ROOT / "tests" / "distributed" / "launched.py"
_STARTED_S, _ENDED_S = 60.0, 30.0


class Launches:
    """A folder for everything that launches leave, and the mark of all their processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        # Without scripts/, where the package comm would hide `comm` from a notebook's kernel.
        self.environment = marked_environment(folder)

    def start(self, launcher: str) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, str(SCRIPT), launcher, str(self.folder)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=self.environment,
                start_new_session=True,
            )  # fmt: skip

    def wait_for_ranks(self, ranks: int = 2) -> None:
        wait_until(lambda: len(list(self.folder.glob("started-*"))) >= ranks, _STARTED_S, lambda: "no ranks")

    def check_nothing_is_left(self, seconds: float = 1.0) -> None:
        """Check that all processes, and all files, are gone or go soon."""
        _, left = psutil.wait_procs(processes_of(str(self.folder)), timeout=seconds)
        assert [" ".join(process.cmdline()) for process in left] == []
        wait_until(lambda: not self.files(), seconds, lambda: str(self.files()))

    def files(self) -> list[str]:
        return [path.name for path in self.temporary.iterdir() if path.name.startswith("trainer-")]


@pytest.fixture
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    calls = Launches(tmp_path)
    for name, value in calls.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", str(calls.temporary))
    monkeypatch.chdir(tmp_path)
    yield calls
    kill_job(str(tmp_path))


def train(scale: float, *, offset: float) -> tuple[int, list[int], list[float]]:
    """Train a step on two ranks, whose data differ, and return the rank, all ranks and the weights."""
    import torch

    run = trainer.init()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    loss = model(torch.tensor([[scale * (run.world.rank + 1) + offset]])).sum()
    run.backward(loss)
    optimizer.step()
    print(f"trained by {run.world.launcher}", run.world.rank)
    print("a word", file=sys.stderr)
    return run.world.rank, run.all_gather(run.world.rank), [float(value) for value in model.parameters()]


def test_every_rank_s_result_is_returned_in_order(launches: Launches, capsys: pytest.CaptureFixture[str]) -> None:
    results = trainer.launch(train, 2.0, offset=1.0, np=2, launcher="mpi")
    assert results == [(0, [0, 1], [-4.0]), (1, [0, 1], [-4.0])]
    launches.check_nothing_is_left()
    assert list(launches.folder.glob("runs")) == []
    printed = capsys.readouterr()
    for rank in (0, 1):
        assert f"[{rank}] trained by horovodrun {rank}\n" in printed.out
        assert f"[{rank}] a word\n" in printed.err
    assert "trainer run" not in printed.err


class Mine(Exception):  # noqa: N818
    """An exception of the user's own."""


def fail_on_rank_1(folder: str) -> None:
    """Count the calls on one rank and fail there, while the other one waits for it."""
    run = trainer.init()
    if run.world.rank == 1:
        with Path(folder, "calls").open("a") as calls:
            calls.write("x")
        raise Mine(1, "E7")
    run.all_gather(run.world.rank)


def test_the_failing_rank_s_own_exception_is_raised_and_nothing_started_again(launches: Launches) -> None:
    with pytest.raises(Mine) as raised:
        trainer.launch(fail_on_rank_1, str(launches.folder), np=2, launcher="gloo")
    assert raised.value.args == (1, "E7")
    assert raised.value.__notes__ == [f"raised by rank 1 of 2 on host {socket.gethostname()}"]
    assert 'raise Mine(1, "E7")' in str(raised.value.__cause__)
    assert (launches.folder / "calls").read_text() == "x"
    launches.check_nothing_is_left()


def kill_rank_1() -> None:
    """Kill one rank, for which the other one waits."""
    run = trainer.init()
    if run.world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    run.all_gather(run.world.rank)


def test_a_rank_that_is_killed_is_named(launches: Launches) -> None:
    with pytest.raises(trainer.LaunchError, match="rank 1 on localhost died without a word before its first update"):
        trainer.launch(kill_rank_1, np=2, launcher="torchrun")
    launches.check_nothing_is_left()


def fail_once(folder: str) -> int:
    """Fail on rank 1 at the first call, and return the number of calls at the second one."""
    rank = int(os.environ["HOROVOD_RANK"])
    calls = [Path(folder, f"calls-{number}") for number in (0, 1)]
    count = int(calls[rank].read_text()) + 1 if calls[rank].exists() else 1
    calls[rank].write_text(str(count))
    while not calls[0].exists():
        time.sleep(0.05)
    if count == 1 and rank == 1:
        raise RuntimeError("the first time")
    if count == 1:
        time.sleep(60)
    return count


def test_a_job_that_fails_is_started_again(launches: Launches, capsys: pytest.CaptureFixture[str]) -> None:
    results = trainer.launch(fail_once, str(launches.folder), np=2, launcher="gloo", max_restarts=1)
    assert results == [2, 2]
    assert "trainer run: attempt 2: 2 ranks on localhost:2" in capsys.readouterr().err
    launches.check_nothing_is_left()


def test_ctrl_c_ends_all(launches: Launches) -> None:
    pressed: list[float] = []

    def press(session: Session, terminal: int) -> None:
        if not pressed and len(list(launches.folder.glob("started-*"))) == 2:
            pressed.append(time.monotonic())
            os.write(terminal, b"\x03")

    session = run_on_terminal(
        [sys.executable, str(SCRIPT), "mpi", str(launches.folder)],
        env=launches.environment, on_change=press, timeout_s=_STARTED_S,
    )  # fmt: skip
    assert session.code == 130
    assert "interrupted, and ended in good order" in session.text
    assert time.monotonic() - pressed[0] < _ENDED_S
    launches.check_nothing_is_left()


def test_a_caller_that_is_killed_leaves_nothing(launches: Launches) -> None:
    process = launches.start("gloo")
    launches.wait_for_ranks()
    assert len(launches.files()) >= 1
    process.kill()
    process.wait()
    launches.check_nothing_is_left(_ENDED_S)


def test_a_second_interrupt_ends_even_a_job_that_takes_its_time(launches: Launches) -> None:
    process = launches.start("gloo")
    launches.wait_for_ranks()
    for child in psutil.Process(process.pid).children():
        if "horovodrun" in " ".join(child.cmdline()):
            child.suspend()
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(1.0)
    assert process.wait(_ENDED_S) == 130
    launches.check_nothing_is_left()


# Both say who the ranks are as torchrun does.
@pytest.mark.parametrize("launcher", ["accelerate", pytest.param("elastic", marks=pytest.mark.slow)])
def test_a_function_trains_where_another_library_starts_it(launches: Launches, launcher: str) -> None:
    python = sys.executable
    if launcher == "accelerate" and importlib.util.find_spec("accelerate") is None:
        requirements.need("peers")
        python = str(PEERS / "bin/python")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    script = ROOT / "tests" / "distributed" / "launched_by_others.py"
    done = subprocess.run(
        [python, str(script), launcher, str(launches.folder), str(port)],
        capture_output=True, text=True, check=False, timeout=100, env=launches.environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert json.loads((launches.folder / f"weights-{rank}").read_text()) == ["torchrun", -4.0]


@pytest.mark.parametrize("unit", launching_units(), ids=str)
def test_the_pages_snippets_run(launches: Launches, unit: Unit) -> None:
    script = launches.folder / "train.py"
    script.write_text(unit.text)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=100,
        env=launches.environment, cwd=launches.folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    launches.check_nothing_is_left()


@pytest.mark.needs("notebook")
def test_the_notebook_trains_on_two_ranks_with_a_bar(launches: Launches) -> None:
    import nbclient
    import nbformat

    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.outputs for cell in cells] == [[] for cell in cells], "it is committed without outputs"
    assert [cell.execution_count for cell in cells] == [None for cell in cells]
    assert '"auto"' in cells[0].source
    cells[0].source = cells[0].source.replace('"auto"', '"digits"')
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(ROOT / "examples")}}).execute()
    printed = {
        name: "".join(o.text for o in cells[2].outputs if o.get("name") == name) for name in ("stdout", "stderr")
    }
    assert "[0] epoch 1:" in printed["stdout"]
    assert "[0] epoch 3: 100%|" in printed["stderr"]
    assert "\r[0] epoch 3:" in printed["stderr"]
    assert float(cells[3].outputs[0].text.partition("%")[0]) > 85
    launches.check_nothing_is_left()

"""A look at a rank from outside: its heartbeat, its process, its stacks, and what they tell."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

import trainer
from trainer.cluster.processes import GONE, Process
from trainer.ops.watcher import ranks as ranks_module
from trainer.ops.watcher.job import Doing, View
from trainer.ops.watcher.ranks import LocalRank, LocalRanks, takes_signal
from trainer.watch import heartbeat
from trainer.watch.heartbeat import State, note
from trainer.watch.stack import Frame, collective_of, main_frames, place_of

SITE = "/usr/lib/python3.11/site-packages"
# A rank that computes in C and never lets go of the interpreter's lock.
RANK = """
from trainer.watch import heartbeat
def spin():
    sum(range(10 ** 12))
print(heartbeat.open_record(0), flush=True)
spin()
"""


@pytest.fixture
def rank() -> Iterator[LocalRanks]:
    with subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield LocalRanks({0: process.stdout.readline().decode().strip()})
        process.kill()


def wait_for(ranks: LocalRanks, doing: Doing) -> None:
    deadline = time.monotonic() + 5
    while ranks.views()[0].doing is not doing and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ranks.views()[0].doing is doing


def test_a_process_that_holds_the_interpreters_lock_tells_its_stack_and_one_that_is_stopped_none(
    rank: LocalRanks,
) -> None:
    deadline, frames = time.monotonic() + 10, list[str]()
    while not any("in spin" in line for line in frames) and time.monotonic() < deadline:  # it has just begun
        view = rank.views_with_stacks()[0]
        frames = list(view.frames)
    assert (view.doing, view.at) == (Doing.RUNS, "<string>:4")
    rank.by_rank[0].signal(signal.SIGSTOP)
    wait_for(rank, Doing.STOPPED)
    assert rank.views_with_stacks()[0].stacks == ""
    rank.by_rank[0].signal(signal.SIGKILL)
    wait_for(rank, Doing.GONE)
    assert rank.running == []


def test_a_process_without_the_handler_takes_no_signal_that_would_end_it() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not takes_signal(process.pid)
        process.kill()


def test_a_rank_is_seen_with_its_heartbeat_and_its_stacks(capfd: pytest.CaptureFixture[str]) -> None:
    record = str(heartbeat.open_record(1))
    ranks, views = LocalRanks({1: record}), list[View]()
    with heartbeat.waits("broadcast"):
        thread = threading.Thread(target=lambda: views.extend(ranks.views_with_stacks().values()))
        thread.start()
        thread.join()
    (view,) = views
    assert (view.doing, view.what, view.rank) == (Doing.WAITS, "broadcast", 1)
    assert any("test_a_rank_is_seen" in line for line in view.frames)
    # The heartbeat of another rank, as where a number of a descriptor has been used again.
    assert LocalRanks({5: record}).running == []
    assert "hangs are not watched for on rank 5: its heartbeat is another process's" in capfd.readouterr().err
    heartbeat._forget()


class Looked:
    """This process as rank 0, whose process and stack are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank = LocalRank(0, str(heartbeat.open_record(0)))
        self.process, self.frames, self.now, self.threads = Process("S", 0.0), list[Frame](), 100.0, set[int]()
        monkeypatch.setattr(ranks_module, "look", self._look)
        monkeypatch.setattr(ranks_module, "main_frames", lambda *_: self.frames)
        monkeypatch.setattr(ranks_module, "time", SimpleNamespace(monotonic=lambda: self.now))

    def _look(self, pid: int, thread: int) -> Process:
        self.threads.add(thread)
        return self.process

    def view(self, state: str = "S", cpu_s: float = 0.0) -> View:
        self.rank.ask()
        self.now, self.process = self.now + 1.0, Process(state, cpu_s)
        return self.rank.with_stacks()


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Looked]:
    yield Looked(monkeypatch)
    heartbeat._forget()


@pytest.mark.parametrize(
    ("process", "state", "is_at_end", "doing"),
    [
        ("S", State.BETWEEN, False, Doing.RUNS),
        ("R", State.LOADER, False, Doing.LOADS),
        ("S", State.WAITING, False, Doing.WAITS),
        ("S", State.FAILED, False, Doing.FAILED),
        ("T", State.WAITING, False, Doing.STOPPED),
        ("t", State.WAITING, False, Doing.DEBUGS),
        (GONE, State.BETWEEN, False, Doing.GONE),
        (GONE, State.BETWEEN, True, Doing.ENDED),
        ("S", State.BETWEEN, True, Doing.ENDED),
        ("S", State.WAITING, True, Doing.WAITS),  # as it closes its strategy
    ],
)
def test_what_a_rank_does_follows_from_its_process_and_its_heartbeat(
    looked: Looked, process: str, state: int, is_at_end: bool, doing: Doing
) -> None:
    note(state=state, is_at_end=is_at_end)
    assert looked.view(process).doing is doing
    assert looked.threads == {threading.get_native_id()}


def frame(path: str, name: str = "call") -> Frame:
    return Frame(path, 1, name)


@pytest.mark.parametrize(
    ("path", "doing"),
    [
        ("/home/me/train.py", Doing.RUNS),
        ("/usr/lib/python3.11/pdb.py", Doing.DEBUGS),
        (f"{SITE}/debugpy/server/api.py", Doing.DEBUGS),
        ("/home/me/my_pdb.py", Doing.RUNS),
        (f"{SITE}/torch/distributed/distributed_c10d.py", Doing.WAITS),
    ],
)
def test_a_debugger_and_a_collective_without_a_mark_are_recognized(looked: Looked, path: str, doing: Doing) -> None:
    looked.frames = [frame(path)]
    assert looked.view().doing is doing


@pytest.mark.parametrize(("cpu_s", "doing"), [(0.0, Doing.WAITS), (0.9, Doing.RUNS)])
def test_a_rank_in_a_backward_pass_waits_unless_it_computes(looked: Looked, cpu_s: float, doing: Doing) -> None:
    looked.frames = [frame(f"{SITE}/torch/autograd/graph.py")]
    assert looked.view(cpu_s=cpu_s).doing is doing


PENDING = {"enqueued": 7, "completed": 5, "pending": "collective 6 of process group 0"}


@pytest.mark.parametrize(
    "facts",
    [
        {"read_at": 97.0},  # since then another thread may hold the interpreter's lock
        {"pending": "", "completed": 7},
        {"state": State.FAILED},
    ],
)
def test_what_is_old_or_completed_makes_nobody_wait(looked: Looked, facts: dict[str, object]) -> None:
    note(**{**PENDING, "read_at": looked.now, **facts})
    assert looked.view().doing in (Doing.RUNS, Doing.FAILED)


def test_a_file_of_pytorchs_that_is_being_imported_waits_in_no_collective() -> None:
    path = f"{SITE}/torch/distributed/fsdp/_fully_shard/_fsdp_param.py"
    assert collective_of([Frame(path, 9, "all_gather")]) == "fully_shard's forward pass"
    assert collective_of([Frame(path, 9, "<module>"), Frame("/home/me/train.py", 29, "<module>")]) == ""


def test_the_main_threads_frames_are_found_without_those_that_only_note() -> None:
    stacks = """Thread 0x00007f0000000001 (most recent call first):
  File "/x/pool.py", line 3 in work

Current thread 0x00007f00000000a2 (most recent call first):
  File "/x/trainer/watch/heartbeat.py", line 190 in call
  File "/home/me/train.py", line 12 in load
"""
    assert main_frames(stacks, 0x7F00000000A2) == [Frame("/home/me/train.py", 12, "load")]
    assert main_frames(stacks, 0x7F00000000A3) == []


def test_the_place_of_a_rank_is_the_innermost_line_of_the_users_own() -> None:
    theirs = [frame(f"{SITE}/torch/x.py"), frame(trainer.__file__), frame("/usr/lib/python3.11/threading.py")]
    own = [Frame("/home/me/trainer/model.py", 31, "forward"), frame("/home/me/train.py")]
    assert (place_of([*theirs, *own]), place_of(theirs)) == ("model.py:31", "")

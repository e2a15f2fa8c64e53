"""When a watcher looks and judges, what it waits for, what it says before, and where it writes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.unit.hang_watchers import Ranks, absent, run, waiting, watcher_of
from trainer.ops.verdict import HANG, WAITS, JobVerdict
from trainer.ops.watcher import watcher as watcher_module
from trainer.ops.watcher.job import Doing
from trainer.ops.watcher.watcher import Watcher


@pytest.fixture(autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[JobVerdict | None]:
    """What a watcher notes for `trainer run`."""
    notes: list[JobVerdict | None] = []
    monkeypatch.setattr(watcher_module, "write_verdict", notes.append)
    return notes


def after(watcher: Watcher, monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    """Let the watcher tick, so long after one another."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watcher.tick()
    for more in seconds:
        now += more
        watcher.tick()


def test_the_stacks_are_in_the_folder_of_the_run_s_record_and_follow_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.strftime", lambda text: "now")
    precious, file = tmp_path / "precious", tmp_path / "hang-now-a.txt"
    precious.write_text("text")
    for path in (file, tmp_path / f".{file.name}.partial"):
        path.symlink_to(precious)
    run(watcher_of(Ranks(waiting(0, folder=str(tmp_path)), absent(1)), 0.1))
    assert precious.read_text() == "text"
    assert "no progress" in file.read_text()
    assert not file.is_symlink()


@pytest.mark.parametrize(("fault", "said"), [("file", "File exists"), ("hangs", "the disk does not answer within 0 s")])
def test_a_disk_keeps_no_verdict_back(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, fault: str, said: str
) -> None:
    (tmp_path / "file").touch()
    if fault == "hangs":
        monkeypatch.setattr(watcher_module, "_WRITTEN_S", 0.1)
        monkeypatch.setattr(watcher_module, "_write", lambda *_: time.sleep(1.0))
    ranks = Ranks(waiting(0, folder=str(tmp_path / "file")), absent(1))
    run(watcher_of(ranks, 0.1), seconds=0.9)
    assert ranks.are_ended
    printed = capfd.readouterr().err.splitlines()
    assert printed[0].startswith("trainer: hang: no progress for")
    assert printed[-1] == f"trainer: hang: the ranks' stacks cannot be written: {said}"


@pytest.mark.parametrize("what", ["gradients", "barrier"])
def test_a_host_whose_ranks_all_wait_says_for_what_and_ends_them_late(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], noted: list[JobVerdict | None], what: str
) -> None:
    ranks = Ranks(waiting(0, at="train.py:31"), waiting(1, what))
    watcher = watcher_of(ranks, 5.0, others=2)
    after(watcher, monkeypatch, 6.0, 20.0, 500.0)
    assert not watcher.verdict
    printed = capfd.readouterr().err
    assert printed.count("the cause may be on another host; the limit without progress is 540 s") == 1
    assert "no progress for 6 s: rank 0 on a waits for the gradients of step 8 at train.py:31; rank 1" in printed
    (note,) = noted
    assert note is not None
    assert (note.kind, note.text.startswith("the gradients of step 8 at train.py:31")) == (WAITS, True)
    after(watcher, monkeypatch, 30.0)
    assert watcher.verdict is not None
    assert noted[1:] == [JobVerdict(HANG, note.text)]


def test_what_was_noted_is_taken_back_when_a_rank_goes_on(
    monkeypatch: pytest.MonkeyPatch, noted: list[JobVerdict | None]
) -> None:
    ranks = Ranks(waiting(0))
    watcher = watcher_of(ranks, 5.0, others=1)
    after(watcher, monkeypatch, 6.0)
    ranks.seen[0] = waiting(0, events=1)
    watcher.tick()
    assert noted == [JobVerdict(WAITS, "the gradients of step 8"), None]


@pytest.mark.parametrize(("steps", "given_s", "limit_s"), [(1, None, 540), (1, 5.0, 5), (0, 5.0, 1800)])
def test_the_limit_is_what_the_user_has_set_once_a_step_was_taken(
    monkeypatch: pytest.MonkeyPatch, steps: int, given_s: float | None, limit_s: float
) -> None:
    watcher = watcher_of(Ranks(waiting(0, steps=steps), absent(1, steps=steps)), given_s)
    after(watcher, monkeypatch, limit_s - 1)
    assert watcher.verdict is None
    after(watcher, monkeypatch, 2.0)
    assert watcher.verdict is not None


@pytest.mark.parametrize("counter", ["events", "pieces", "enqueued", "completed"])
def test_a_job_that_goes_on_gets_no_verdict(monkeypatch: pytest.MonkeyPatch, counter: str) -> None:
    ranks = Ranks(waiting(0), absent(1))
    watcher = watcher_of(ranks, 5.0)
    for count in range(9):
        ranks.seen[1] = absent(1, Doing.RUNS, **{counter: count})
        after(watcher, monkeypatch, 4.0)
    assert watcher.verdict is None
    after(watcher, monkeypatch, 2.0)
    assert watcher.verdict is not None


def test_long_before_the_limit_it_is_said_once_what_is_waited_for_and_the_next_time_later(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = Ranks(waiting(0), absent(1, at="train.py:31"))
    watcher = watcher_of(ranks, None)
    after(watcher, monkeypatch, 31.0, 30.0, 400.0)
    assert watcher.verdict is None
    assert capfd.readouterr().err == (
        "trainer: no progress for 31 s: rank 1 on a is in user code at train.py:31; rank 0 on a waits for the "
        "gradients of step 8; the limit without progress is 540 s\n"
    )
    ranks.seen[0] = waiting(0, events=1)
    after(watcher, monkeypatch, 31.0)
    assert capfd.readouterr().err == ""
    after(watcher, monkeypatch, 30.0)
    assert capfd.readouterr().err.count("no progress for 61 s") == 1


@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize(
    "ranks",
    [
        Ranks(absent(0, Doing.STOPPED), absent(1, Doing.STOPPED)),
        Ranks(waiting(0), absent(1, Doing.DEBUGS)),
        Ranks(waiting(0), absent(1), with_stack=absent(1, Doing.DEBUGS)),  # at a prompt of pdb
    ],
)
def test_a_host_whose_user_has_stopped_it_is_waited_for_and_told_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], ranks: Ranks, others: int
) -> None:
    watcher = watcher_of(ranks, 5.0, others=others)
    after(watcher, monkeypatch, *[6.0] * 9)
    assert watcher.verdict is None
    assert capfd.readouterr().err.count("the ranks on a are stopped; hangs are watched for when they go on") == 1


def test_a_rank_that_goes_on_while_it_is_looked_at_hangs_no_more(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = Ranks(waiting(0), absent(1), with_stack=absent(1, events=1))
    watcher = watcher_of(ranks, 20.0)
    after(watcher, monkeypatch, 21.0)
    assert (ranks.looks, watcher.verdict, capfd.readouterr().err) == (1, None, "")

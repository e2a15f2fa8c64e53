"""When a watcher looks and judges, what it waits for, and what it says before."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.unit.hang_watchers import Ranks, run, waiting, watcher_of
from trainer.ops.watcher import limits as limits_module
from trainer.ops.watcher import watcher as watcher_module
from trainer.ops.watcher.job import WORKS, View
from trainer.ops.watcher.watcher import Watcher
from trainer.watch.heartbeat import State
from trainer.watch.job_folder import HANG, WAITS


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What a watcher notes for `trainer run`."""
    notes: list[tuple[object, ...]] = []
    monkeypatch.setattr(watcher_module, "write_verdict", lambda *verdict: notes.append(verdict))
    monkeypatch.setattr(watcher_module, "remove_verdict", lambda: notes.append(()))
    return notes


def test_the_rank_that_does_not_wait_is_named_and_all_ranks_are_ended(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, noted: list[tuple[object, ...]]
) -> None:
    monkeypatch.chdir(tmp_path)
    ranks = Ranks(waiting(0), View(rank=1, steps=9))
    watcher = watcher_of(ranks, 0.2)
    run(watcher)
    assert watcher.verdict is not None
    assert watcher.verdict.culprits == (1,)
    watcher.end()
    assert ranks.are_ended
    assert noted == [(HANG, watcher.verdict.first, (1,))]
    printed = capfd.readouterr().err
    assert printed.count("trainer: hang: no progress for") == 1
    assert all(line.startswith("trainer: hang: ") for line in printed.splitlines())
    assert "every rank's stack is in runs/job-hang-" in printed


def test_a_rank_that_is_in_no_collective_is_named_where_the_others_are_on_other_hosts() -> None:
    watcher = watcher_of(Ranks(View(rank=1, steps=9)), 0.2, others=1, host="b")
    run(watcher)
    assert watcher.verdict is not None
    assert watcher.verdict.culprits == (1,)
    assert "rank 1 on b is in no collective" in watcher.verdict.first
    alone = watcher_of(Ranks(View(rank=0, steps=9), View(rank=1, steps=9)), 0.1)
    run(alone, 0.5)
    assert alone.verdict is None, "a whole job of which no rank waits for another"


@pytest.mark.parametrize("others", [View(rank=1, steps=9, state=State.WAITING, what="barrier"), waiting(1)])
def test_a_host_whose_ranks_all_wait_says_for_what_and_ends_them_late(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    noted: list[tuple[object, ...]],
    others: View,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(limits_module, "LONGEST_S", 1.0)
    monkeypatch.setattr(watcher_module, "_LOOK_AGAIN_S", 0.05)
    ranks = Ranks(waiting(0).replaced(at="train.py:31"), others)
    watcher = watcher_of(ranks, 0.1, others=2)
    run(watcher, seconds=0.6)
    assert not watcher.verdict
    printed = capfd.readouterr().err
    assert printed.count("the cause may be on another host; the limit without progress is 1 s") == 1
    assert "waited 0 s for the gradients of step 10 at train.py:31" in printed
    ((kind, what),) = noted
    assert kind == WAITS
    assert str(what).startswith("the gradients of step 10 at train.py:31")
    run(watcher)
    assert watcher.verdict is not None
    watcher.end()
    assert noted[1:] == [(HANG, what, ())]
    assert "the stack of each rank on a is in runs/job-hang-" in capfd.readouterr().err


def test_what_was_noted_is_taken_back_when_a_rank_goes_on(noted: list[tuple[object, ...]]) -> None:
    ranks = Ranks(waiting(0))
    watcher = watcher_of(ranks, 0.1, others=1)
    run(watcher, seconds=0.3)
    ranks.seen[0] = waiting(0, 10)
    watcher.tick()
    assert noted == [(WAITS, "the gradients of step 10"), ()]


def test_a_host_whose_ranks_all_wait_for_their_data_is_given_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module, "LEAST_S", 0.1)
    for state, is_judged in ((State.LOADER, False), (State.BETWEEN, True)):
        ranks = Ranks(waiting(1, 0))
        watcher = watcher_of(ranks, None, others=1)
        for steps in range(1, 9):
            ranks.seen[1] = waiting(1, steps)
            watcher.tick()
        ranks.seen[1] = View(rank=1, steps=9, state=state)
        run(watcher, seconds=0.5)
        assert (watcher.verdict is not None) is is_judged


def test_a_disk_that_does_not_answer_keeps_no_verdict_back(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watcher_module, "_WRITTEN_S", 0.1)
    monkeypatch.setattr(watcher_module, "_write", lambda *_: time.sleep(1.0))
    ranks = Ranks(waiting(0), View(rank=1, steps=9))
    watcher = watcher_of(ranks, 0.1)
    run(watcher)
    started = time.monotonic()
    watcher.end()
    assert time.monotonic() - started < 0.9
    assert ranks.are_ended
    printed = capfd.readouterr().err.splitlines()
    assert printed[0].startswith("trainer: hang: no progress for")
    assert printed[-1].startswith("trainer: hang: the ranks' stacks cannot be written: the disk does not answer")


def test_a_job_that_goes_on_gets_no_verdict() -> None:
    ranks = Ranks(waiting(0))
    watcher = watcher_of(ranks, 0.2)
    for events in range(50):
        ranks.seen[0] = View(rank=0, state=State.WAITING, steps=9, events=events)
        watcher.tick()
        time.sleep(0.01)
    assert watcher.verdict is None
    run(watcher)
    assert watcher.verdict is not None


@pytest.mark.parametrize("excuse", ["debugger", "compiles"])
def test_who_debugs_or_compiles_is_waited_for(excuse: str) -> None:
    watcher = watcher_of(Ranks(waiting(0), View(rank=1, steps=9, excuse=excuse)), 0.1)
    run(watcher, seconds=0.5)
    assert watcher.verdict is None


@pytest.mark.parametrize(("given_s", "is_judged"), [(None, False), (0.1, True)])
def test_who_works_is_waited_for_unless_the_user_has_set_the_limit(
    monkeypatch: pytest.MonkeyPatch, given_s: float | None, is_judged: bool
) -> None:
    monkeypatch.setattr(limits_module, "LEAST_S", 0.1)
    ranks = Ranks(waiting(0, 0), waiting(1, 8))
    watcher = watcher_of(ranks, given_s)
    for steps in range(1, 9):  # past the start, whose limit is longer
        ranks.seen[0] = waiting(0, steps)
        watcher.tick()
    ranks.seen[1] = View(rank=1, steps=8, excuse=WORKS)
    run(watcher, seconds=1.0)
    assert (watcher.verdict is not None) is is_judged


@pytest.mark.parametrize(("excuse", "is_judged"), [("debugger", False), ("compiles", True)])
def test_a_compiler_is_waited_for_up_to_the_longest_time_and_a_debugger_for_ever(
    monkeypatch: pytest.MonkeyPatch, excuse: str, is_judged: bool
) -> None:
    monkeypatch.setattr(limits_module, "LONGEST_S", 0.2)
    monkeypatch.setattr(watcher_module, "_LOOK_AGAIN_S", 0.05)
    watcher = watcher_of(Ranks(waiting(0), View(rank=1, steps=9, excuse=excuse)), 0.1)
    run(watcher, seconds=0.6)
    assert (watcher.verdict is not None) is is_judged


@pytest.mark.parametrize(("excuse", "count"), [("", 1), (WORKS, 1), ("compiles", 0)])
def test_what_is_waited_for_is_said_once_in_a_wait_and_nothing_is_ended(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], excuse: str, count: int
) -> None:
    monkeypatch.setattr(watcher_module, "_NOTICE_S", 0.3)
    ranks = Ranks(waiting(0, 1), View(rank=1, steps=1, excuse=excuse, at="train.py:31"))  # whose limit is 540 s
    watcher = watcher_of(ranks, None)
    run(watcher, seconds=1.0)
    assert not watcher.verdict
    printed = capfd.readouterr().err
    assert printed.count("trainer: rank 0 has waited") == count
    assert printed.count("rank 1 on a is in user code at train.py:31") == count
    for events, seconds, more in ((1, 0.2, 0), (2, 1.0, count)):  # twice as long before the next one
        ranks.seen[0] = View(rank=0, state=State.WAITING, what="gradients", steps=1, events=events)
        run(watcher, seconds=seconds)
        assert capfd.readouterr().err.count("has waited") == more


def test_where_a_verdict_is_near_no_notice_comes_before(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watcher_module, "_NOTICE_S", 0.2)
    watcher = watcher_of(Ranks(waiting(0), View(rank=1, steps=9)), 0.3)
    run(watcher)
    assert watcher.verdict is not None
    assert "waited" not in capfd.readouterr().err


@pytest.mark.parametrize("others", [0, 2])
def test_a_host_whose_ranks_are_stopped_is_waited_for_and_told_once(
    capfd: pytest.CaptureFixture[str], others: int
) -> None:
    ranks = Ranks(View(rank=0, steps=9, process="T"), View(rank=1, steps=9, process="T"))
    watcher = watcher_of(ranks, 0.1, others=others)
    run(watcher, seconds=0.5)
    assert watcher.verdict is None
    assert capfd.readouterr().err.count("the ranks on a are stopped") == 1


def test_a_host_that_slept_counts_anew() -> None:
    watcher = watcher_of(Ranks(waiting(0), View(rank=1, steps=9)), 0.3)
    watcher.tick()
    time.sleep(0.35)
    watcher.postpone()
    run(watcher, seconds=0.2)
    assert watcher.verdict is None
    run(watcher)
    assert watcher.verdict is not None


class Looked(Ranks):
    """Ranks of which rank 1 is seen differently when its stack is looked at."""

    def __init__(self, **changes: object) -> None:
        super().__init__(waiting(0), View(rank=1, steps=9))
        self._changes = changes

    def views_with_stacks(self) -> dict[int, View]:
        views = super().views_with_stacks()
        return {**views, 1: views[1].replaced(**self._changes)}


def after(watcher: Watcher, monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    """Let the watcher tick, so long after one another."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watcher.tick()
    for more in seconds:
        now += more
        watcher.tick()


def test_what_a_stack_excuses_holds_until_the_next_look_which_is_not_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Looked(excuse="compiles", stacks="compile_fx")
    watcher = watcher_of(ranks, 20.0)
    after(watcher, monkeypatch, 21.0, 1.0, 10.0)
    assert ranks.looks == 1
    after(watcher, monkeypatch, 6.0, 1.0)
    assert watcher.verdict is None
    assert ranks.looks == 2


def test_a_rank_that_goes_on_while_it_is_looked_at_hangs_no_more(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = Looked(events=1)
    watcher = watcher_of(ranks, 20.0)
    after(watcher, monkeypatch, 21.0)
    assert ranks.looks == 1
    assert watcher.verdict is None
    assert capfd.readouterr().err == ""

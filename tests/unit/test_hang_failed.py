"""The watcher of a job that has failed: it says once which rank called another collective."""

from __future__ import annotations

import time

import pytest

from tests.unit.hang_watchers import Ranks, waiting, watcher_of
from trainer.ops.watcher import watcher as watcher_module
from trainer.ops.watcher.job import View
from trainer.watch import failure
from trainer.watch.heartbeat import State


def failed(rank: int, elements: int) -> View:
    what = {"what": "all_reduce", "is_counted": True, "elements": elements}
    return View(rank=rank, state=State.FAILED, steps=9, failures=1, **what)


def test_a_failed_collective_is_explained_once_when_all_ranks_may_have_failed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = list[str]()
    monkeypatch.setattr(watcher_module, "write_verdict", lambda kind, text: noted.append(f"{kind}: {text}"))
    ranks = Ranks(waiting(0), waiting(1))
    watcher = watcher_of(ranks, 60.0, others=2)
    watcher.tick()
    ranks.seen = {0: failed(0, 10), 1: failed(1, 11)}
    began = time.monotonic()
    watcher.tick()
    assert capfd.readouterr().err == "", "ranks do not fail at the same moment"
    while "why it failed" not in (printed := capfd.readouterr().err) and time.monotonic() < began + 3:
        watcher.tick()
        time.sleep(0.01)
    assert time.monotonic() - began < failure._LET_WATCHER_EXPLAIN_S
    watcher.leave()
    assert printed + capfd.readouterr().err == (
        "trainer: why it failed: rank 0 on a called all_reduce of 10 elements (collective 1, after step 9)\n"
        "trainer: why it failed: rank 1 on a called all_reduce of 11 elements (collective 1, after step 9)\n"
        "trainer: why it failed: every rank has to call the same collectives in the same order, with tensors of the "
        "same shape\n"
    )
    called = "rank 0 on a called all_reduce of 10 elements (collective 1, after step 9); rank 1 on a called"
    assert [text.partition(called)[0] for text in noted] == ["different collectives: "]


def test_a_watcher_whose_ranks_have_ended_says_why_by_what_they_did_last(capfd: pytest.CaptureFixture[str]) -> None:
    ranks = Ranks(waiting(0), waiting(1))
    watcher = watcher_of(ranks, 60.0)
    watcher.tick()
    ranks.seen = {0: failed(0, 10), 1: failed(1, 11)}
    watcher.leave()
    assert capfd.readouterr().err.count("trainer: why it failed: ") == 3


def test_what_ranks_of_other_hosts_called_is_not_known(capfd: pytest.CaptureFixture[str]) -> None:
    ranks = Ranks(waiting(0))
    watcher = watcher_of(ranks, 60.0, others=1)
    ranks.seen = {0: failed(0, 10)}
    watcher.leave()
    assert capfd.readouterr().err == ""

"""The watcher of a job that has failed: it says once which rank called another collective."""

from __future__ import annotations

import time

import pytest

from tests.unit.hang_watchers import Ranks, waiting, watcher_of
from trainer.ops.watcher import watcher as watcher_module
from trainer.ops.watcher.job import Doing, View
from trainer.watch import failure
from trainer.watch.heartbeat import State
from trainer.watch.job_folder import DIFFERENT, JobVerdict


def failed(rank: int, elements: int) -> View:
    facts = {"doing": Doing.FAILED, "state": State.FAILED, "is_counted": True, "failures": 1, "collectives": 0}
    return waiting(rank, "all_reduce", elements=elements, **facts)


def test_a_failed_collective_is_explained_once_when_all_ranks_may_have_failed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = list[JobVerdict]()
    monkeypatch.setattr(watcher_module, "write_verdict", noted.append)
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
    watcher.tick()
    lines = (
        "rank 0 on a called all_reduce of 10 elements (collective 1, after step 7)",
        "rank 1 on a called all_reduce of 11 elements (collective 1, after step 7)",
        "every rank has to call the same collectives in the same order, with tensors of the same shape",
    )
    assert printed + capfd.readouterr().err == "".join(f"trainer: why it failed: {line}\n" for line in lines)
    assert noted == [JobVerdict(DIFFERENT, "; ".join(lines))]


def test_a_watcher_whose_ranks_have_ended_says_why_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    ranks = Ranks(failed(0, 10), failed(1, 11))
    ranks.are_ended = True
    watcher_of(ranks, 60.0).tick()
    assert capfd.readouterr().err.count("trainer: why it failed: ") == 3

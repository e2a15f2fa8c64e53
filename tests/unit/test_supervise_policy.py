"""Which hosts a job is started on again, when, and when not."""

from __future__ import annotations

import pytest

from trainer.ops.supervise.hosts import Host
from trainer.ops.supervise.outcome import Attempt, Judgement, Times, Verdict
from trainer.ops.supervise.policy import GiveUp, Restart, bad_hosts, choose_hosts, decide

A, B = Host("a", 2), Host("b", 2)
NOW = 10_000.0


def failed(
    update: int | None = None,
    *,
    blamed: tuple[str, ...] = (),
    hosts: tuple[Host, ...] = (A, B),
    verdict: Verdict = Verdict.FAILED,
    ended: float = NOW,
) -> Attempt:
    updates = None if update is None else (1, update)
    return Attempt(hosts, "", Times(0.0, ended=ended), 0.0, Judgement(verdict, "", blamed), updates)


def test_ranks_go_to_the_hosts_that_are_well_in_their_order() -> None:
    assert choose_hosts((A, B), {"a", "b"}, (), 4) == (A, B)
    assert choose_hosts((A, B), {"a", "b"}, (), 3) == (A, Host("b", 1))
    assert choose_hosts((A, B), {"b"}, (), 4) == (B,)
    assert choose_hosts((A, B), {"a", "b"}, {"a"}, 4) == (B,)
    assert choose_hosts((A, B), (), (), 4) == ()


def test_a_host_that_fails_three_times_in_five_is_left_out_where_the_job_can_do_without() -> None:
    history = [failed(5, blamed=("b",)), failed(6, blamed=("a",)), failed(7, blamed=("b",))]
    assert bad_hosts(history, (A, B), 2, NOW) == ()
    history.append(failed(8, blamed=("b",)))
    assert bad_hosts(history, (A, B), 2, NOW) == ("b",)
    assert bad_hosts(history, (A, B), 3, NOW) == ()
    assert bad_hosts(history, (B,), 1, NOW) == ()


def test_a_host_returns_when_other_failures_have_followed() -> None:
    history = [failed(blamed=("b",))] * 3 + [failed(blamed=("a",))] * 2
    assert bad_hosts(history, (A, B), 2, NOW) == ("b",)
    assert bad_hosts([*history, failed()], (A, B), 2, NOW) == ()


def test_failures_of_more_than_an_hour_ago_do_not_count_against_a_host() -> None:
    history = [failed(blamed=("b",), ended=NOW - ago) for ago in (3601, 60, 1)]
    assert bad_hosts(history, (A, B), 2, NOW) == ()
    assert bad_hosts(history, (A, B), 2, NOW - 2) == ("b",)


def test_of_two_bad_hosts_the_worst_goes_first() -> None:
    history = [failed(blamed=("a", "b"))] * 3 + [failed(blamed=("b",))]
    assert bad_hosts(history, (A, B), 2, NOW) == ("b",)


def test_a_preemption_is_no_failure_of_a_host() -> None:
    history = [failed(blamed=("b",), verdict=Verdict.PREEMPTED)] * 3
    assert bad_hosts(history, (A, B), 2, NOW) == ()


@pytest.mark.parametrize(("update", "where"), [(None, "before the first update"), (7, "after update 7")])
def test_three_failures_at_the_same_place_are_enough(update: int | None, where: str) -> None:
    assert isinstance(decide([failed(update)] * 2, 100, (A, B)), Restart)
    refused = decide([failed(update), failed(update, verdict=Verdict.HUNG), failed(update)], 100, (A, B))
    assert isinstance(refused, GiveUp)
    assert where in refused.text


def test_failures_at_different_updates_or_on_other_hosts_are_not_the_same() -> None:
    assert isinstance(decide([failed(5), failed(6), failed(5)], 100, (A, B)), Restart)
    assert isinstance(decide([failed(5)] * 3, 100, (A,)), Restart)
    assert isinstance(decide([failed(5), failed(5, hosts=(A,)), failed(5)], 100, (A, B)), Restart)
    assert isinstance(decide([failed(5, verdict=Verdict.PREEMPTED)] * 3, 100, (A, B)), Restart)


def test_restarts_are_bounded() -> None:
    history = [failed(update) for update in range(1, 4)]
    assert isinstance(decide(history, 3, (A, B)), Restart)
    refused = decide(history, 2, (A, B))
    assert isinstance(refused, GiveUp)
    assert "2 restarts" in refused.text


def test_after_progress_there_is_no_wait_and_without_it_the_wait_doubles() -> None:
    progress, none = failed(9), failed(verdict=Verdict.PREEMPTED)
    waits = [decide([progress, *[none] * count], 100, (A, B)) for count in range(9)]
    assert waits == [Restart(wait) for wait in (0, 1, 2, 4, 8, 16, 32, 60, 60)]

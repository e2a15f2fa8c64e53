"""Which hosts a job is started on again, when, and when not."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.ops.supervise.hosts import Host
from trainer.ops.supervise.outcome import Attempt, Judgement
from trainer.ops.supervise.policy import GiveUpError, bad_hosts, choose_hosts, wait_s
from trainer.watch.heartbeat import Heartbeat

A, B = Host("a", 2), Host("b", 2)
NOW = 10_000.0


def failed(
    update: int = 0, *blamed: str, hosts: tuple[Host, ...] = (A, B), verdict: Any = "failed", ended_at: float = NOW
) -> Attempt:
    ranks = {0: Heartbeat(updates=update, first_update=1)} if update else {}
    return Attempt(hosts=hosts, judgement=Judgement(verdict, "", blamed), ended_at=ended_at, ranks=ranks)


def test_ranks_go_to_the_hosts_that_are_not_left_out_in_their_order() -> None:
    assert choose_hosts((A, B), (), 4) == (A, B)
    assert choose_hosts((A, B), (), 3) == (A, Host("b", 1))
    assert choose_hosts((A, B), {"a"}, 4) == (B,)


def test_a_host_that_fails_three_times_in_five_is_left_out_where_the_job_can_do_without() -> None:
    history = [failed(5, "b"), failed(6, "a"), failed(7, "b")]
    assert bad_hosts(history, (A, B), 2, NOW) == ()
    history.append(failed(8, "b"))
    assert bad_hosts(history, (A, B), 2, NOW) == ("b",)
    assert bad_hosts(history, (A, B), 3, NOW) == ()
    assert bad_hosts(history, (B,), 1, NOW) == ()
    assert bad_hosts([*history, failed(9, "a"), failed(10)], (A, B), 2, NOW) == (), "others have followed"
    assert bad_hosts([failed(5, "a", "b")] * 3 + [failed(5, "b")], (A, B), 2, NOW) == ("b",), "the worst goes first"


def test_failures_of_more_than_an_hour_ago_and_preemptions_do_not_count_against_a_host() -> None:
    history = [failed(0, "b", ended_at=NOW - ago) for ago in (3601, 60, 1)]
    assert bad_hosts(history, (A, B), 2, NOW) == ()
    assert bad_hosts(history, (A, B), 2, NOW - 2) == ("b",)
    assert bad_hosts([failed(0, "b", verdict="preempted")] * 3, (A, B), 2, NOW) == ()


@pytest.mark.parametrize(("update", "where"), [(0, "before the first update"), (7, "after update 7")])
def test_three_failures_at_the_same_update_on_the_same_hosts_are_enough(update: int, where: str) -> None:
    wait_s([failed(update)] * 2, 100, (A, B))
    with pytest.raises(GiveUpError, match=where):
        wait_s([failed(update), failed(update, verdict="hung"), failed(update)], 100, (A, B))
    wait_s([failed(update), failed(update + 1), failed(update)], 100, (A, B))
    wait_s([failed(update)] * 3, 100, (A,))
    wait_s([failed(update), failed(update, hosts=(A,)), failed(update)], 100, (A, B))
    wait_s([failed(update, verdict="preempted")] * 3, 100, (A, B))


def test_restarts_are_bounded() -> None:
    history = [failed(update) for update in range(1, 4)]
    assert wait_s(history, 3, (A, B)) == 0
    with pytest.raises(GiveUpError, match="2 restarts"):
        wait_s(history, 2, (A, B))


def test_after_progress_there_is_no_wait_and_without_it_the_wait_doubles() -> None:
    progress, none = failed(9), failed(verdict="preempted")
    waits = [wait_s([progress, *[none] * count], 100, (A, B)) for count in range(9)]
    assert waits == [0, 1, 2, 4, 8, 16, 32, 60, 60]

"""The verdicts of a job's hosts beside each other: the host that is stuck, or what they wait for."""

from __future__ import annotations

import pytest

from trainer.ops.verdict import DIFFERENT, HANG, WAITS, JobVerdict, compare

STUCK = JobVerdict(HANG, "no progress for 31 s: rank 1 on b is in no collective", (1,))
ELSEWHERE = JobVerdict(HANG, "the gradients of step 8 at train.py:31")
WAITING = JobVerdict(WAITS, "the gradients of step 8 at train.py:31")
BARRIER = JobVerdict(WAITS, "barrier (collective 4, after step 7) at train.py:40")
FAILED = JobVerdict(DIFFERENT, "rank 0 on a called all_reduce of 10 elements; rank 1 on a called barrier")


@pytest.mark.parametrize("other", [None, WAITING, ELSEWHERE, FAILED])
def test_the_host_with_a_rank_that_does_not_wait_is_stuck(other: JobVerdict | None) -> None:
    assert compare({"a": other, "b": STUCK}) == STUCK


def test_several_stuck_hosts_are_all_told() -> None:
    more = JobVerdict(HANG, "rank 0 on a is stopped", (0,))
    assert compare({"b": STUCK, "a": more}) == JobVerdict(HANG, f"{STUCK.text}; {more.text}", (0, 1))


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ({"a": WAITING, "b": WAITING}, f"all hosts wait for {WAITING.text}, and none of them is missing"),
        (
            {"a": WAITING, "b": BARRIER},
            f"the hosts wait for different things: a waits for {WAITING.text}; b waits for {BARRIER.text}",
        ),
        ({"a": None, "b": WAITING}, f"b waits for {WAITING.text}; a does not: look there for the cause"),
        ({"a": None, "b": WAITING, "c": None}, f"b waits for {WAITING.text}; a, c do not: look there for the cause"),
    ],
)
def test_what_the_hosts_wait_for_is_compared(hosts: dict[str, JobVerdict | None], text: str) -> None:
    assert compare(hosts) == JobVerdict(WAITS, text)


def test_a_host_that_has_ended_its_waiting_ranks_makes_the_job_hung_and_blames_no_rank() -> None:
    found = compare({"a": WAITING, "b": ELSEWHERE})
    assert found == JobVerdict(HANG, f"all hosts wait for {WAITING.text}, and none of them is missing")


def test_different_collectives_on_a_host_explain_a_failure() -> None:
    assert compare({"a": FAILED, "b": WAITING}) == FAILED
    assert compare({"a": FAILED, "b": None}) == FAILED


def test_a_single_host_is_believed_and_nothing_comes_of_nothing() -> None:
    assert compare({"a": ELSEWHERE}) == ELSEWHERE
    assert compare({"a": None, "b": None}) is None
    assert compare({}) is None

"""The verdict: which rank keeps the others waiting, from what is seen of all of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.hang_watchers import absent, waiting
from trainer.ops.watcher.job import Doing, Host, View
from trainer.ops.watcher.judge import Verdict, judge


def host(*views: View, is_whole_job: bool = True) -> Host:
    return Host("a", {view.rank: view for view in views}, is_whole_job)


def judged(*views: View, is_whole_job: bool = True) -> Verdict:
    verdict = judge(host(*views, is_whole_job=is_whole_job), 31.4)
    assert verdict is not None
    return verdict


def test_the_rank_that_does_not_wait_is_the_cause_and_its_user_s_lines_are_shown() -> None:
    library = [f'File "/x/site-packages/torch/a.py", line {line}, in call' for line in range(9)]
    frames = (*library, 'File "train.py", line 12, in load')
    told = judged(waiting(0), absent(1, Doing.LOADS, frames=frames, at="train.py:12"), waiting(2, at="train.py:9"))
    assert told == Verdict(
        (
            "no progress for 31 s: rank 1 on a did not come to the gradients of step 8",
            "rank 1 on a waits for its data at train.py:12",
            *(f"    {frame}" for frame in (*library[:2], frames[-1])),
            "rank 0 on a waits for the gradients of step 8",
            "rank 2 on a waits for the gradients of step 8 at train.py:9",
            "what to do: look at the dataset and its workers; DataLoader's timeout= makes an error of a worker that "
            "hangs",
        ),
        (1,),
    )
    assert told.notice == (
        "rank 1 on a waits for its data at train.py:12; rank 0 on a waits for the gradients of step 8; "
        "rank 2 on a waits for the gradients of step 8 at train.py:9"
    )


@pytest.mark.parametrize("likeliest", [Doing.ENDED, Doing.GONE])
def test_a_rank_that_fails_because_another_is_gone_is_not_the_cause(likeliest: Doing) -> None:
    assert judged(waiting(0), absent(1, likeliest), absent(2, Doing.FAILED)).culprits == (1,)
    assert judged(waiting(0), absent(1, Doing.ENDED), absent(2, Doing.GONE)).culprits == (1,)


def test_where_all_wait_the_one_in_another_collective_is_the_cause() -> None:
    alone = waiting(1, "all_reduce", elements=1000, is_counted=True, at="train.py:31")
    told = judged(waiting(0), alone, waiting(2))
    assert told.culprits == (1,)
    called = "all_reduce of 1,000 elements (collective 4, after step 7) at train.py:31"
    assert told.lines[0].endswith(f"rank 1 on a did not come to the gradients of step 8: rank 1 in {called}")
    assert told.lines[1] == f"rank 1 on a waits for {called}"
    assert "every rank has to call the same collectives" in told.lines[-1]
    assert judged(waiting(0), alone, absent(2)).culprits == (2,), "who is away is more likely the cause"


@pytest.mark.parametrize("other", [{"what": "barrier"}, {"collectives": 4}, {"steps": 8}, {"elements": 11}])
def test_two_ranks_in_different_collectives_are_both_named(other: dict[str, Any]) -> None:
    told = judged(waiting(0), waiting(1, **{"what": "gradients", **other}))
    assert told.culprits == (0, 1)
    assert told.lines[0].startswith("no progress for 31 s: ranks 0, 1 on a wait in different collectives: rank")


def test_where_all_wait_for_the_same_nobody_is_blamed() -> None:
    told = judged(waiting(0), waiting(1))
    assert told.culprits == ()
    assert told.lines[0].endswith(
        "all ranks on a wait, and none of them is missing: ranks 0, 1 in the gradients of step 8"
    )
    assert "check the network" in told.lines[-1]
    # The same one from two lines may be right: two models, say, of which a slow network delays one.
    told = judged(waiting(0, at="train.py:31"), waiting(1, at="train.py:40"))
    assert (told.culprits, "network" in told.lines[-1]) == ((), False)


def test_by_the_flight_recorder_a_rank_that_completed_a_collective_earlier_is_not_the_cause() -> None:
    views = [
        waiting(0, "collective 62 of process group 0", is_recorded=True, steps=9),
        waiting(1, "collective 61 of process group 0", is_recorded=True),
    ]
    assert judged(*views).culprits == ()
    skips = waiting(2, "collective 61 of process group 0: nccl:barrier", is_recorded=True)
    assert judged(*views, skips, waiting(3, views[1].what, is_recorded=True)).culprits == (2,)
    told = judged(*views[1:], absent(2, enqueued=60, completed=60))
    assert told.culprits == (2,)
    assert told.lines[0].endswith("rank 2 on a did not come to collective 61 of process group 0")


def test_a_job_in_which_nobody_waits_is_left_alone() -> None:
    assert judge(host(absent(0), absent(1, Doing.LOADS)), 31.4) is None


def test_of_one_of_several_hosts_a_rank_that_is_in_no_collective_is_the_cause() -> None:
    told = judged(absent(2), absent(3, Doing.LOADS), is_whole_job=False)
    assert (told.culprits, told.waits_for) == ((2, 3), "")
    assert told.lines[0].endswith("ranks 2, 3 on a are in no collective, and ranks of other hosts may be in one")
    told = judged(absent(2), waiting(3), is_whole_job=False)
    assert (told.culprits, told.waits_for) == ((2,), "")


@pytest.mark.parametrize("doing", [Doing.ENDED, Doing.GONE, Doing.FAILED])
def test_of_one_of_several_hosts_who_ends_keeps_nobody_waiting(doing: Doing) -> None:
    assert judge(host(absent(2, doing), is_whole_job=False), 31.4) is None


@pytest.mark.parametrize(
    ("what", "waits_for"),
    [
        ("gradients", "the gradients of step 8 at train.py:4"),
        ("barrier", "the gradients of step 8 at train.py:4 and barrier (after step 7) at train.py:4"),
    ],
)
def test_of_one_of_several_hosts_whose_ranks_all_wait_the_cause_may_be_on_another(what: str, waits_for: str) -> None:
    told = judged(waiting(2, at="train.py:4"), waiting(3, what, at="train.py:4"), is_whole_job=False)
    assert (told.culprits, told.waits_for) == ((), waits_for)
    assert told.notice.endswith("; the cause may be on another host")

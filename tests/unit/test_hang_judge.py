"""The verdict: which rank keeps the others waiting, from what is seen of all of them."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.ops.watcher.job import WORKS, Host, View
from trainer.ops.watcher.judge import Verdict, is_paused, judge, notice
from trainer.ops.watcher.limits import LEAST_S, LONGEST_S, Limit, stage_of
from trainer.watch.heartbeat import State


def waiting(rank: int, what: str = "gradients", **facts: Any) -> View:
    return View(rank=rank, state=State.WAITING, what=what, **{"steps": 7, "collectives": 3, **facts})


def absent(rank: int, **facts: Any) -> View:
    return View(rank=rank, steps=7, collectives=3, **facts)


def host(name: str, *views: View, is_whole_job: bool = True) -> Host:
    return Host(name, {view.rank: view for view in views}, is_whole_job)


def judged(host: Host) -> Verdict:
    verdict = judge(host, 31.4)
    assert verdict is not None
    return verdict


def test_the_rank_that_does_not_wait_is_the_cause() -> None:
    frames = ('File "/lib/python3.11/threading.py", line 1, in wait', 'File "train.py", line 12, in load')
    told = judged(host("a", waiting(0), absent(1, frames=frames), waiting(2)))
    assert told.culprits == (1,)
    assert told.lines == (
        "no progress for 31 s: rank 1 on a did not come to the gradients of step 8",
        "rank 1 on a does something else:",
        f"    {frames[0]}",
        f"    {frames[1]}",
        "ranks 0, 2 wait for the gradients of step 8",
        "what to do: look at the stack above; if it only takes long, give more time with TRAINER_HANG_TIMEOUT "
        "(seconds; 0: off)",
    )


def test_the_users_own_lines_are_shown_however_deep_the_stack_is() -> None:
    library = [f'File "/x/site-packages/torch/a.py", line {line}, in call' for line in range(9)]
    told = judged(host("a", waiting(0), absent(1, frames=(*library, 'File "train.py", line 12, in load'))))
    shown = [line.strip() for line in told.lines if line.startswith("    ")]
    assert shown == [*library[:2], 'File "train.py", line 12, in load']


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"process": "T"}, "is stopped (by SIGSTOP or Ctrl-Z)"),
        ({"process": "X"}, "is gone: its process has ended"),
        ({"process": "D"}, "is in uninterruptible sleep: a disk or a network file system does not answer"),
        ({"state": State.LOADER}, "waits for its data, and has not told its stack"),
        ({"cpu": 0.97}, "computes, and has not told its stack"),
        ({"phase": "evaluation"}, "does something else (evaluation), and has not told its stack"),
    ],
)
def test_what_the_rank_does_instead_is_said(facts: dict[str, Any], said: str) -> None:
    told = judged(host("a", waiting(0), absent(1, **facts)))
    assert told.culprits == (1,)
    assert f"rank 1 on a {said}" in told.lines


def test_a_rank_that_is_stopped_in_the_same_collective_is_the_cause() -> None:
    told = judged(host("a", waiting(0), waiting(1, process="T"), waiting(2)))
    assert told.culprits == (1,)


def test_where_all_wait_the_one_in_another_collective_is_the_cause() -> None:
    told = judged(host("a", waiting(0), waiting(1, "all_reduce", elements=10, is_counted=True), waiting(2)))
    assert told.culprits == (1,)
    assert "rank 1 on a waits for all_reduce of 10 elements (collective 4, after step 7), which the others do not" in (
        told.lines
    )


def test_a_broken_collective_does_not_hide_the_rank_that_is_away() -> None:
    told = judged(host("a", waiting(0), waiting(1, "barrier"), absent(2)))
    assert told.culprits == (2,)


@pytest.mark.parametrize("other", [{"what": "barrier"}, {"collectives": 4}, {"steps": 8}, {"elements": 11}])
def test_two_ranks_in_different_collectives_are_both_named(other: dict[str, Any]) -> None:
    told = judged(host("a", waiting(0), waiting(1, **{"what": "gradients", **other})))
    assert told.culprits == (0, 1)
    assert told.first.startswith("no progress for 31 s: rank 0 on a and rank 1 on a wait in different collectives")


def test_of_different_collectives_each_is_told_with_its_line_and_no_network_is_blamed() -> None:
    alone = waiting(0, "DDP's forward pass", at="train.py:31")
    told = judged(host("a", alone, waiting(1, at="train.py:40")))
    places = (
        "rank 0 in DDP's forward pass (after step 7) at train.py:31, rank 1 in the gradients of step 8 at train.py:40"
    )
    assert told.first.endswith(f" wait in different collectives: {places}")
    told = judged(host("a", alone, waiting(1, at="train.py:40"), waiting(2, at="train.py:40")))
    assert "rank 0 on a did not come to the gradients of step 8: rank 0 in DDP's forward pass" in told.first
    assert "ranks 1, 2 wait for the gradients of step 8 at train.py:40" in told.lines
    # The same one from two lines may be right: two models, say, of which a slow network delays one.
    told = judged(host("a", waiting(0, at="train.py:31"), waiting(1, at="train.py:40")))
    assert (told.culprits, told.is_sure) == ((), False)
    assert told.first.endswith(
        "rank 0 in the gradients of step 8 at train.py:31, rank 1 in the gradients of step 8 at train.py:40"
    )
    assert "network" not in "".join(told.lines)


NOTICES = [
    (
        [waiting(0, at="a.py:4"), absent(1, at="a.py:3"), waiting(2, at="a.py:4")],
        "ranks 0, 2 have waited 31 s for the gradients of step 8 at a.py:4; rank 1 on a is in user code at a.py:3",
    ),
    (
        [waiting(0), absent(1, at="a.py:3", state=State.LOADER)],
        "rank 0 has waited 31 s for the gradients of step 8; rank 1 on a waits for its data at a.py:3",
    ),
    (
        [waiting(0), absent(1, phase="saving")],
        "rank 0 has waited 31 s for the gradients of step 8; rank 1 on a is in user code (saving)",
    ),
    (
        [waiting(0), absent(1, process="T")],
        "rank 0 has waited 31 s for the gradients of step 8; rank 1 on a is stopped (by SIGSTOP or Ctrl-Z)",
    ),
    (
        [waiting(0), waiting(1, "barrier")],
        "rank 0 has waited 31 s for the gradients of step 8; rank 1 has waited 31 s for barrier (after step 7)",
    ),
]


@pytest.mark.parametrize(("views", "text"), NOTICES)
def test_a_notice_tells_who_waits_and_what_the_others_do(views: list[View], text: str) -> None:
    assert notice(host("a", *views), 31.4, 540.0) == f"{text}; the limit without progress is 540 s"


@pytest.mark.parametrize("views", [[absent(0), absent(1)], [waiting(0), waiting(1)]])
def test_no_notice_where_no_rank_waits_for_another_one_as_far_as_is_known(views: list[View]) -> None:
    assert notice(host("a", *views), 31.4, 540.0) == ""


def test_where_all_wait_for_the_same_nobody_is_blamed() -> None:
    told = judged(host("a", waiting(0), waiting(1)))
    assert told.culprits == ()
    assert "all ranks wait for the gradients of step 8, and none of them is missing" in told.first


def recorded(rank: int, what: str = "gradients", **facts: Any) -> View:
    """A rank that waits by the flight recorder."""
    return waiting(rank, what, is_recorded=True, **{"group": "NCCL 0", "number": 61, "steps_before": 7, **facts})


def test_a_collective_of_the_flight_recorder_is_named_by_the_step_that_it_is_of() -> None:
    views = [recorded(0, steps=9), absent(1, enqueued=60, completed=60), recorded(2)]
    told = judged(host("a", *views))  # the program of rank 0 is ahead of its device
    assert (told.culprits, told.is_sure) == ((1,), True)
    assert "ranks 0, 2 wait for the gradients of step 8" in told.lines
    told = judged(host("a", recorded(0, "all_reduce", elements=1000, steps=9), absent(1)))
    assert "did not come to all_reduce of 1,000 elements (NCCL's collective 61, after step 7)" in told.first
    assert "broadcast at the start" in judged(host("a", recorded(0, "broadcast", steps_before=0), absent(1))).first


def test_ranks_at_other_places_of_their_programs_wait_in_the_same_collective() -> None:
    told = judged(host("a", recorded(0, steps=8, collectives=5), recorded(1), recorded(2, phase="saving")))
    assert (told.culprits, told.is_sure) == ((), False)


@pytest.mark.parametrize("other", [{"what": "barrier"}, {"elements": 11}])
def test_the_rank_in_another_collective_of_a_process_group_is_the_cause(other: dict[str, Any]) -> None:
    assert judged(host("a", recorded(0), recorded(1, **{"what": "gradients", **other}), recorded(2))).culprits == (1,)
    assert judged(host("a", recorded(0), waiting(1, "barrier"), recorded(2))).culprits == (1,)


@pytest.mark.parametrize("ahead", [(1,), (1, 2)])
def test_a_rank_that_was_done_with_a_collective_earlier_is_not_the_cause(ahead: tuple[int, ...]) -> None:
    views = [recorded(rank, number=62 if rank in ahead else 61) for rank in range(4)]
    told = judged(host("a", *views))
    assert (told.culprits, told.is_sure) == ((), False)
    told = judged(host("a", *views, recorded(4, number=61, elements=11)))
    assert told.culprits == (4,)


def test_collectives_of_different_process_groups_blame_nobody() -> None:
    views = [recorded(0), recorded(1, group="NCCL 1", number=9), recorded(2), recorded(3)]
    told = judged(host("a", *views))
    assert (told.culprits, told.is_sure) == ((), False)
    told = judged(host("a", *views, absent(4)))
    assert told.culprits == (4,)


def test_ranks_that_all_compute_on_their_gpus_are_left_alone() -> None:
    views = [absent(rank, enqueued=60, completed=60, cpu=1.0) for rank in range(3)]
    assert judge(host("a", *views), 31.4) is None


def test_a_job_in_which_nobody_waits_is_left_alone() -> None:
    assert judge(host("a", absent(0), absent(1)), 31.4) is None


def test_of_one_of_several_hosts_a_rank_that_is_in_no_collective_is_the_cause() -> None:
    told = judged(host("b", absent(2, frames=("a",)), absent(3, state=State.LOADER), is_whole_job=False))
    assert (told.culprits, told.is_sure, told.waits_for) == ((2, 3), True, "")
    assert told.first.endswith(
        "rank 2 on b and rank 3 on b are in no collective, and ranks of other hosts may be in one"
    )
    assert "    a" in told.lines
    told = judged(host("b", absent(2), waiting(3), is_whole_job=False))
    assert (told.culprits, told.is_sure, told.waits_for) == ((2,), True, "")
    assert told.first.endswith("rank 2 on b did not come to the gradients of step 8")


def test_of_one_of_several_hosts_who_has_ended_or_loads_data_is_not_surely_to_blame() -> None:
    assert judge(host("b", absent(2, is_at_end=True), absent(3, process="X"), is_whole_job=False), 31.4) is None
    assert judge(host("b", absent(2, state=State.FAILED), is_whole_job=False), 31.4) is None  # as it lost another host
    assert not judged(host("b", absent(2, state=State.LOADER), is_whole_job=False)).is_sure
    assert not judged(host("b", absent(2, excuse=WORKS), is_whole_job=False)).is_sure


def test_of_one_of_several_hosts_whose_ranks_all_wait_the_cause_may_be_on_another() -> None:
    told = judged(host("b", waiting(2, at="train.py:4"), waiting(3, at="train.py:4"), is_whole_job=False))
    assert (told.culprits, told.is_sure) == ((), False)
    assert told.waits_for == "the gradients of step 8 at train.py:4"
    assert told.first.endswith(
        "all ranks on b wait for the gradients of step 8 at train.py:4, and none of them is missing; the cause may be "
        "on another host"
    )
    said = notice(host("b", waiting(2, "all_reduce", elements=10, is_counted=True), is_whole_job=False), 31.4, 540.0)
    assert said == (
        "rank 2 on b has waited 31 s for all_reduce of 10 elements (collective 4, after step 7); the cause may be on "
        "another host; the limit without progress is 540 s"
    )


def test_ranks_of_one_host_in_different_collectives_are_named_though_the_cause_may_be_elsewhere() -> None:
    told = judged(host("b", waiting(2), waiting(3, "barrier"), is_whole_job=False))
    assert (told.culprits, told.waits_for) == ((2, 3), "the gradients of step 8 and barrier (after step 7)")
    assert "rank 2 on b and rank 3 on b wait in different collectives" in told.first


@pytest.mark.parametrize(
    ("views", "is_sure"),
    [
        ([waiting(0), absent(1)], True),
        ([waiting(0), absent(1, process="T")], True),
        ([waiting(0), waiting(1, "barrier")], True),
        ([waiting(0), absent(1, excuse=WORKS)], False),
        ([waiting(0), absent(1, process="D")], False),
        ([waiting(0), absent(1), absent(2, excuse=WORKS)], False),
        ([waiting(0), waiting(1)], False),  # which a slow network may be
    ],
)
def test_what_may_go_on_by_itself_is_no_sure_hang(views: list[View], is_sure: bool) -> None:
    assert judged(host("a", *views)).is_sure is is_sure


def test_a_rank_that_fails_because_another_is_gone_is_not_the_cause() -> None:
    assert judged(host("a", waiting(0), absent(1, process="X"), absent(2))).culprits == (1,)
    assert judged(host("a", waiting(0), absent(1, is_at_end=True), absent(2, process="X"))).culprits == (1,)


def test_a_rank_whose_script_has_ended_is_not_gone() -> None:
    told = judged(host("b", waiting(0), absent(1, process="X", is_at_end=True)))
    assert "rank 1 on b has ended: its script has reached its end, or has called sys.exit" in told.lines


def test_collectives_are_named_as_the_user_knows_them() -> None:
    assert "the evaluation (all_reduce)" in judged(host("a", waiting(0, "all_reduce", phase="evaluation"))).first
    assert "the checkpoint (all_gather)" in judged(host("a", waiting(0, "all_gather", phase="saving"))).first
    assert "broadcast at the start" in judged(host("a", waiting(0, "broadcast", steps=0))).first


def test_of_many_ranks_eight_are_named() -> None:
    told = judged(host("a", waiting(0), *(absent(rank) for rank in range(1, 30))))
    assert "and 21 more ranks that did not come" in told.lines


def test_a_host_whose_ranks_were_stopped_by_their_user_is_paused() -> None:
    assert is_paused(host("a", absent(0, process="T"), waiting(1, process="T")))
    assert is_paused(host("a", waiting(0), absent(1, process="t")))  # a debugger
    assert not is_paused(host("a", waiting(0), absent(1, process="T")))
    assert not is_paused(host("a"))


@pytest.mark.parametrize("counter", ["events", "steps", "updates", "pieces", "enqueued", "completed"])
def test_whatever_a_rank_counts_is_progress(counter: str) -> None:
    assert View(rank=0).replaced(**{counter: 5}).changed_since(View(rank=0))
    assert not View(rank=0, state=State.WAITING, cpu=0.5).changed_since(View(rank=0))


START_S = 1800.0


def limit_after(*gaps: float, steps: int = 9, phase: str = "training", given_s: float | None = None) -> Limit:
    limit, now = Limit(given_s, START_S, 0.0), 0.0
    views = [absent(0, phase=phase), absent(1, phase=phase)]
    views = [View(rank=view.rank, steps=steps, phase=phase) for view in views]
    limit.on_progress(views, now)
    for gap in gaps:
        now += gap
        limit.on_progress(views, now)
    return limit


def test_the_limit_is_ten_times_the_longest_time_between_steps() -> None:
    assert limit_after(0.1, 0.2).seconds == LEAST_S
    assert limit_after(4.0, 2.0).seconds == 40.0
    assert limit_after(200.0).seconds == LONGEST_S
    assert limit_after(200.0, *[4.0] * 100).seconds == 40.0  # lately
    assert limit_after(20.0, *[0.1] * 100).seconds == 200.0  # and short ones displace no long one


def test_the_start_the_first_steps_and_what_was_never_seen_are_given_the_longest() -> None:
    assert limit_after(0.1, steps=0).seconds == START_S
    assert limit_after(0.1, steps=2).seconds == LONGEST_S
    assert limit_after(0.1, phase="evaluation").seconds == LONGEST_S


def test_an_evaluation_is_measured_once_the_job_has_come_through_one() -> None:
    limit = limit_after(6.0, phase="evaluation")
    limit.on_progress([View(rank=0, steps=9, phase="training")], 7.0)
    limit.on_progress([View(rank=0, steps=9, phase="evaluation")], 8.0)
    assert (limit.stage, limit.seconds) == ("evaluation", 60.0)


def test_a_given_limit_holds_from_the_first_step_on() -> None:
    assert limit_after(20.0, given_s=5.0).seconds == 5.0
    assert limit_after(20.0, given_s=5.0, phase="evaluation").seconds == 5.0
    assert limit_after(20.0, given_s=5.0, steps=0).seconds == START_S


def test_a_pause_is_no_step() -> None:
    limit = limit_after(1.0)
    limit.progress_at = 500.0
    limit.on_progress([View(rank=0, steps=9, phase="training")], 500.5)
    assert limit.seconds == LEAST_S


def test_a_loop_without_a_loader_trains_as_well() -> None:
    assert stage_of([View(rank=0, steps=9, phase="joined")]) == "training"
    assert stage_of([View(rank=0, steps=9, phase="training"), View(rank=1, steps=9, phase="saving")]) == "saving"

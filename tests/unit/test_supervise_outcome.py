"""How an attempt has ended, by exit codes and status files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest

from trainer.ops.supervise.attempt import Running, find_dead
from trainer.ops.supervise.hosts import Host, slots_of
from trainer.ops.supervise.options import Options
from trainer.ops.supervise.outcome import Attempt, Facts, Judgement, Times, Verdict, hint, judge
from trainer.ops.supervise.remote import Answer
from trainer.ops.supervise.signals import Signals
from trainer.watch.heartbeat import LOST_PEER, MISTAKE, Heartbeat
from trainer.watch.job_folder import DIFFERENT, HANG, JobVerdict

ORDERS = list(permutations(range(3)))


def rank(number: int, **reported: Any) -> Heartbeat:
    values = {"updates": 9, "first_update": 1, "phase": "training", **reported}
    return Heartbeat(pid=100 + number, rank=number, **values)


def options_for(hosts: tuple[Host, ...]) -> Options:
    return Options(ranks=slots_of(hosts), hosts=hosts, min_ranks=1, command=("python", "train.py"))


def judged(*ranks: Heartbeat, **facts: Any) -> Judgement:
    by_number = {heartbeat.rank: heartbeat for heartbeat in ranks}
    hosts = {number: "abc"[number] for number in by_number}
    return judge(Facts(launcher="horovodrun", ranks=by_number, host_of=hosts, **facts))


def test_exit_code_0_is_done() -> None:
    assert judged(rank(0, phase="done"), codes=[0]) == Judgement(Verdict.DONE, "done", code=0, is_last=True)
    assert judged(codes=[0, 0]).verdict is Verdict.DONE


def test_a_mistake_is_told_by_a_rank_or_by_the_code() -> None:
    told = judged(rank(0), rank(1, error=MISTAKE, message="batch_size is 0"), codes=[1])
    assert (told.verdict, told.text, told.code, told.is_last) == (
        Verdict.MISTAKE,
        "rank 1 on b: batch_size is 0",
        78,
        True,
    )
    for code in (2, 78, 126, 127):
        told = judged(codes=[code])
        assert (told.verdict, told.code) == (Verdict.MISTAKE, code)


def test_an_exception_is_told_with_its_rank_and_host_and_those_that_follow_are_not() -> None:
    told = judged(rank(0, error=LOST_PEER), rank(1, error="MemoryError"), codes=[1], dead=[0])
    assert told == Judgement(Verdict.FAILED, "rank 1 on b failed in update 10: MemoryError", ("b",))
    told = judged(rank(0, error="KeyError", message="'x'\nmore", updates=0, first_update=0), codes=[1])
    assert told.text == "rank 0 on a failed before its first update: KeyError: 'x'"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("phase", ["training", "done"])  # the second where its exit handlers have run
@pytest.mark.parametrize(
    ("cause", "said"),
    [
        ({"error": "MemoryError"}, "rank {} on {} failed in update 10: MemoryError"),
        ({"error": MISTAKE, "message": "lr is 0"}, "rank {} on {}: lr is 0"),
        ({"verdict": JobVerdict(HANG, "why", (0,))}, "why"),
        ({"verdict": JobVerdict(DIFFERENT, "rank 1 called another one")}, "rank 1 called another one"),
        ({}, "rank {} on {} died without a word in update 10"),
    ],
)
def test_a_rank_that_has_lost_another_one_is_not_the_cause(
    order: Sequence[int], phase: str, cause: dict[str, Any], said: str
) -> None:
    """Whichever number it has, and in whichever order they were seen to die."""
    first, second, guilty = order
    others = [rank(number, error=LOST_PEER, phase=phase) for number in (first, second)]
    errors = {name: value for name, value in cause.items() if name != "verdict"}
    for dead in ([first], [first, second], [guilty, first], [first, guilty], list(order)):
        if guilty in dead or cause:
            told = judged(
                *others, rank(guilty, **errors), codes=[1], dead=dead, ended=[first], verdict=cause.get("verdict")
            )
            assert told.text == said.format(guilty, "abc"[guilty])


@pytest.mark.parametrize("order", ORDERS)
def test_where_only_those_that_lost_another_one_have_said_something_they_are_not_blamed(order: Sequence[int]) -> None:
    first, second, third = order
    early = rank(third, phase="done")
    told = judged(
        rank(first, error=LOST_PEER), rank(second, error=LOST_PEER, phase="done"), early, codes=[1], dead=[first]
    )
    lost = " and ".join(f"rank {number} on {'abc'[number]}" for number in sorted((first, second)))
    text = f"{lost} lost another rank in update 10, after rank {third} on {'abc'[third]} had ended"
    assert told == Judgement(Verdict.FAILED, text)
    told = judged(*(rank(number, error=LOST_PEER) for number in order), codes=[1], dead=[first])
    assert told.text == "rank 0 on a and rank 1 on b and rank 2 on c lost another rank in update 10"
    assert told.hosts == ()
    assert told.may_be_network


def test_a_hang_that_the_watch_has_found_is_told_with_its_hosts() -> None:
    said = "no progress for 31 s: rank 1 on x did not come to the gradients of step 8"
    verdict = JobVerdict(HANG, said, (1,))
    told = judged(rank(0, error=LOST_PEER), rank(1), codes=[143], dead=[1], verdict=verdict)
    assert told == Judgement(Verdict.HUNG, said, ("b",))
    told = judged(rank(0), rank(1), codes=[1], verdict=JobVerdict(HANG, "both", (0, 1)))
    assert told == Judgement(Verdict.HUNG, "both", may_be_network=True)
    told = judged(rank(0), rank(1), codes=[1], verdict=JobVerdict(HANG, "all: wait"))
    assert told == Judgement(Verdict.HUNG, "all: wait", may_be_network=True)


def test_errors_that_are_all_the_ranks_own_are_told_before_different_collectives() -> None:
    verdict = JobVerdict(DIFFERENT, "rank 1 called another one")
    errors = [rank(number, error="MemoryError") for number in (0, 1)]
    assert judged(*errors, codes=[1], verdict=verdict).text == "rank 0 on a failed in update 10: MemoryError"


def test_a_rank_that_is_gone_without_a_word_is_named() -> None:
    told = judged(rank(0), rank(1), codes=[137], dead=[1])
    assert told == Judgement(Verdict.FAILED, "rank 1 on b died without a word in update 10 (SIGKILL)", ("b",))
    assert judged(rank(0), rank(1), dead=[1]).text == "rank 1 on b died without a word in update 10"


def test_a_rank_that_dies_after_another_has_ended_may_not_be_the_cause() -> None:
    told = judged(rank(0), rank(1, phase="done"), codes=[1], dead=[0], ended=[1])
    text = "rank 0 on a died without a word in update 10, after rank 1 on b had ended"
    assert told == Judgement(Verdict.FAILED, text)


def test_a_lost_host_comes_before_what_its_ranks_did() -> None:
    told = judged(rank(0, error="HorovodInternalError"), codes=[1], lost={"b": "does not answer in time"})
    assert told == Judgement(Verdict.FAILED, "host b is lost: does not answer in time", ("b",), may_be_network=True)


def test_without_a_rank_the_launcher_s_end_is_told() -> None:
    assert judged(codes=[-9]).text == "horovodrun was ended by SIGKILL"
    assert judged(codes=[1]).text == "horovodrun has ended with code 1, before a rank had joined"
    assert judged(rank(0, phase="done"), codes=[0, 3], dead=[0]).text == "horovodrun has ended with code 3"


def test_what_may_be_the_network_points_to_the_doctor() -> None:
    hosts = (Host("a", 2), Host("b", 2))
    line = "`trainer doctor -H a:2,b:2` looks for the cause on these hosts and between them"
    for told in (
        judged(rank(0), lost={"b": "does not answer"}),
        judged(codes=[1]),
        judged(rank(0), rank(1), idle_s=600.0),
    ):
        assert hint(told, hosts) == line
        assert hint(told, (Host("localhost", 4),)) == ""
    for told in (
        judged(rank(0), rank(1, error="KeyError")),
        judged(codes=[-9]),
        judged(rank(0), rank(1, updates=8), idle_s=9.0),
    ):
        assert hint(told, hosts) == ""


def test_a_hang_names_the_ranks_that_are_furthest_behind() -> None:
    told = judged(rank(0), rank(1, updates=8, phase="evaluation"), idle_s=600.0)
    assert told.verdict is Verdict.HUNG
    assert told.text == "no progress for 600 s; furthest behind: rank 1 on b (evaluation), in update 9"
    assert told.hosts == ("b",)
    assert judged(rank(0), rank(1), idle_s=600.0).hosts == ()
    assert judged(rank(0, reports=2), rank(1, reports=1), idle_s=600.0).hosts == ("b",)


@pytest.mark.parametrize("codes", [[75], []])
def test_ranks_that_save_by_themselves_are_started_again(codes: list[int]) -> None:
    told = judged(rank(0, phase="preempted"), codes=codes)
    assert (told.verdict, told.is_last) == (Verdict.PREEMPTED, False)


def test_what_was_asked_for_is_no_failure() -> None:
    told = judged(rank(0), codes=[1], is_preempted=True)
    assert (told.verdict, told.code, told.is_last) == (Verdict.PREEMPTED, 75, True)
    assert judged(rank(0), codes=[0], is_preempted=True).code == 0
    assert judged(rank(0), codes=[1], was_interrupted=True).verdict is Verdict.INTERRUPTED


def test_ranks_that_a_launcher_has_ended_save_too_and_that_is_no_preemption() -> None:
    told = judged(rank(0, phase="preempted"), rank(1), codes=[137], dead=[1])
    assert told == Judgement(Verdict.FAILED, "rank 1 on b died without a word in update 10 (SIGKILL)", ("b",))
    assert judged(rank(0, phase="preempted"), rank(1, phase="preempted"), codes=[1]).verdict is Verdict.PREEMPTED
    assert judged(rank(0, phase="preempted"), rank(1), codes=[75]).verdict is Verdict.PREEMPTED


@pytest.mark.parametrize(
    ("seen", "gone", "first"),
    [
        ([], {2}, [2]),  # elsewhere; the others have reported their end, or run
        ([1], {1}, [1]),
        ([1], {0, 1, 2, 3}, []),  # the launcher has ended the others after that, or this one too
        ([0, 1], {0, 1, 2, 3}, []),
        ([], {0, 1, 2, 3}, []),
    ],
)
def test_those_that_a_launcher_has_ended_are_not_taken_for_the_cause(
    seen: list[int], gone: set[int], first: list[int]
) -> None:
    assert list(find_dead(seen, gone, (), {0: "a", 1: "a", 2: "b", 3: "b"})) == first


@pytest.mark.parametrize(("seen", "asked"), [([], {0, 1, 3}), ([0, 1], {0, 1, 3}), ([0], {0, 3})])
def test_a_rank_that_was_not_asked_to_end_before_it_died_is_the_cause(seen: list[int], asked: set[int]) -> None:
    gone = {2} | asked
    assert list(find_dead(seen, gone, asked, {0: "a", 1: "a", 2: "b", 3: "b"})) == [2]
    assert list(find_dead([0], asked, asked, {0: "a", 1: "a", 3: "b"})) == [0], "where all were asked, the first death"


def test_the_rank_that_the_launcher_has_named_is_the_cause() -> None:
    hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    assert list(find_dead([0], {0, 1, 2, 3}, (), hosts, failed=[3])) == [3]
    # Rank 3 has said why it ended, so it is not among those that have gone without a word.
    assert list(find_dead([0], {0}, (), hosts, failed=[3])) == [0]


def test_on_one_host_the_first_deaths_that_were_seen_are_the_cause() -> None:
    assert list(find_dead([0, 1], {0, 1}, (), {0: "a", 1: "a"})) == [0, 1]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("guilty_is_here", [True, False])
def test_of_an_attempt_the_rank_is_named_that_died_without_a_word(order: Sequence[int], guilty_is_here: bool) -> None:
    """One that had lost another rank died first, and one was left and had to be killed."""
    first, killed, guilty = order
    hosts = (Host("localhost", 2 + guilty_is_here), *([] if guilty_is_here else [Host("b", 1)]))
    place = dict.fromkeys(order, "localhost") | {guilty: hosts[-1].name}
    started = Attempt(hosts, "job", Times(time.monotonic()), 0.0)
    running = Running(started, options_for(hosts), Signals())
    states = {number: rank(number) for number in order} | {first: rank(first, error=LOST_PEER)}
    for number in order:
        running._ranks.note(place[number], states[number])
    running._ranks.dead, running._ranks.killed = (first,), frozenset([killed])
    answers = [
        Answer(host.name, True, ranks=tuple(states[number] for number in order if place[number] == host.name))
        for host in hosts
    ]
    running._conclude(answers, [1], [])
    running._ranks.close()
    name = f"rank {guilty} on {place[guilty]}"
    assert started.judgement.text == f"{name} died without a word in update 10"

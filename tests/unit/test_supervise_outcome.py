"""How an attempt has ended, by exit codes and heartbeats."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest

from trainer.ops.supervise.attempt import Running, find_dead
from trainer.ops.supervise.hosts import Host
from trainer.ops.supervise.options import Options
from trainer.ops.supervise.outcome import Attempt, Judgement, judge
from trainer.ops.supervise.remote import Answer
from trainer.ops.supervise.signals import Signals
from trainer.watch.heartbeat import LOST_PEER, MISTAKE, Heartbeat
from trainer.watch.job_folder import DIFFERENT, HANG, JobVerdict

ORDERS = list(permutations(range(3)))
HOSTS = (Host("a", 1), Host("b", 1), Host("c", 1))
ADVICE = "; `trainer doctor -H a:1,b:1,c:1` looks for the cause on these hosts and between them"
SILENT = Judgement("failed", "rank 1 on b died without a word in update 10 (SIGKILL)", ("b",))


def rank(number: int, **reported: Any) -> Heartbeat:
    values = {"updates": 9, "first_update": 1, "phase": "training", **reported}
    return Heartbeat(pid=100 + number, rank=number, **values)


def judged(*ranks: Heartbeat, **seen: Any) -> Judgement:
    by_number = {heartbeat.rank: heartbeat for heartbeat in ranks}
    return judge(Attempt(hosts=HOSTS, ranks=by_number, host_of={number: "abc"[number] for number in by_number}, **seen))


@pytest.mark.parametrize(
    ("ranks", "seen", "told"),
    [
        # What was asked for.
        ([rank(0, phase="done")], {"codes": [0]}, Judgement("done", "done", code=0)),
        ([rank(0)], {"codes": [0], "is_preempted": True}, Judgement("done", "done", code=0)),
        ([rank(0)], {"codes": [1], "is_preempted": True}, Judgement("preempted", "preempted", code=75)),
        ([rank(0)], {"codes": [1], "was_interrupted": True}, Judgement("interrupted", "interrupted", code=1)),
        # The user's mistakes.
        (
            [rank(0), rank(1, error=MISTAKE, message="batch_size is 0")],
            {"codes": [1]},
            Judgement("mistake", "rank 1 on b: batch_size is 0", code=78),
        ),
        *(
            ([], {"codes": [code]}, Judgement("mistake", f"horovodrun has ended with code {code}", code=code))
            for code in (2, 78, 126, 127)
        ),
        # Ranks that save by themselves, not because a launcher has ended them after a death.
        *(
            ([rank(0, phase="preempted")], {"codes": codes}, Judgement("preempted", "the ranks have saved, and want "))
            for codes in ([75], [], [1])
        ),
        ([rank(0, phase="preempted"), rank(1)], {"codes": [137], "dead": [1]}, SILENT),
        # Errors, without those that follow from another.
        (
            [rank(0, error=LOST_PEER), rank(1, error="MemoryError")],
            {"codes": [1], "dead": [0]},
            Judgement("failed", "rank 1 on b failed in update 10: MemoryError", ("b",)),
        ),
        (
            [rank(0, error="KeyError", message="'x'\nmore", updates=0, first_update=0)],
            {"codes": [1]},
            Judgement("failed", "rank 0 on a failed before its first update: KeyError: 'x'", ("a",)),
        ),
        (
            [rank(0, error="MemoryError"), rank(1, error="MemoryError")],
            {"codes": [1], "verdict": JobVerdict(DIFFERENT, "rank 1 called another one")},
            Judgement("failed", "rank 0 on a failed in update 10: MemoryError", ("a",)),
        ),
        # Deaths.
        ([rank(0), rank(1)], {"codes": [137], "dead": [1]}, SILENT),
        (
            [rank(0), rank(1, phase="done")],
            {"codes": [1], "dead": [0], "left": [1]},
            Judgement("failed", "rank 0 on a died without a word in update 10, after rank 1 on b had ended"),
        ),
        (
            [rank(0, error="HorovodInternalError")],
            {"codes": [1], "lost": {"b": "does not answer in time"}},
            Judgement("failed", f"host b is lost: does not answer in time{ADVICE}", ("b",)),
        ),
        # The launcher's end.
        ([], {"codes": [137]}, Judgement("failed", "horovodrun has ended with code 137 (SIGKILL), before a rank had ")),
        (
            [],
            {"codes": [1]},
            Judgement("failed", f"horovodrun has ended with code 1, before a rank had joined{ADVICE}"),
        ),
        (
            [rank(0, phase="done")],
            {"codes": [0, 3], "dead": [0]},
            Judgement("failed", f"horovodrun has ended with code 3{ADVICE}"),
        ),
        # Hangs.
        (
            [rank(0), rank(1, updates=8, phase="evaluation")],
            {"idle_s": 600.0},
            Judgement("hung", "no progress for 600 s; furthest behind: rank 1 on b (evaluation), in update 9", ("b",)),
        ),
        (
            [rank(0, reports=2), rank(1, reports=1)],
            {"idle_s": 60.0},
            Judgement("hung", "no progress for 60 s; furthest behind: rank 1 on b (training), in update 10", ("b",)),
        ),
        (
            [rank(0), rank(1)],
            {"idle_s": 60.0},
            Judgement(
                "hung",
                "no progress for 60 s; furthest behind: rank 0 on a (training), rank 1 on b (training), in update 10"
                f"{ADVICE}",
            ),
        ),
        (
            [rank(0, error=LOST_PEER), rank(1)],
            {"codes": [143], "dead": [1], "verdict": JobVerdict(HANG, "rank 1 on x did not come", (1,))},
            Judgement("hung", "rank 1 on x did not come", ("b",)),
        ),
        *(
            (
                [rank(0), rank(1)],
                {"codes": [1], "verdict": JobVerdict(HANG, "all", who)},
                Judgement("hung", f"all{ADVICE}"),
            )
            for who in ((0, 1), ())
        ),
    ],
)
def test_how_an_attempt_has_ended(ranks: Sequence[Heartbeat], seen: dict[str, Any], told: Judgement) -> None:
    found = judged(*ranks, **seen)
    assert (found.verdict, found.hosts, found.code) == (told.verdict, told.hosts, told.code)
    assert found.text.startswith(told.text)
    assert found.text.endswith(ADVICE) == told.text.endswith(ADVICE)


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
            ranks = (*others, rank(guilty, **errors))
            told = judged(*ranks, codes=[1], dead=dead, left=[first], verdict=cause.get("verdict"))
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
    assert told == Judgement("failed", text)
    told = judged(*(rank(number, error=LOST_PEER) for number in order), codes=[1], dead=[first])
    assert told == Judgement(
        "failed", f"rank 0 on a and rank 1 on b and rank 2 on c lost another rank in update 10{ADVICE}"
    )


def test_on_one_host_nothing_between_hosts_is_to_be_looked_for() -> None:
    assert judge(Attempt(hosts=(Host("localhost", 4),), codes=[1])).text.endswith(", before a rank had joined")


FOUR = {0: "a", 1: "a", 2: "b", 3: "b"}


@pytest.mark.parametrize(
    ("seen", "gone", "asked", "host_of", "first"),
    [
        ([], {2}, set(), FOUR, [2]),  # elsewhere; the others have reported their end, or run
        ([1], {1}, set(), FOUR, [1]),
        ([1], {0, 1, 2, 3}, set(), FOUR, []),  # the launcher has ended the others after that, or this one too
        ([0, 1], {0, 1, 2, 3}, set(), FOUR, []),
        ([], {0, 1, 2, 3}, set(), FOUR, []),
        # A rank that was not asked to end before it died.
        ([], {0, 1, 2, 3}, {0, 1, 3}, FOUR, [2]),
        ([0, 1], {0, 1, 2, 3}, {0, 1, 3}, FOUR, [2]),
        ([0], {0, 2, 3}, {0, 3}, FOUR, [2]),
        # Where all were asked, the first death.
        ([0], {0, 1, 3}, {0, 1, 3}, {0: "a", 1: "a", 3: "b"}, [0]),
        ([0, 1], {0, 1}, set(), {0: "a", 1: "a"}, [0, 1]),
    ],
)
def test_those_that_a_launcher_has_ended_are_not_taken_for_the_cause(
    seen: list[int], gone: set[int], asked: set[int], host_of: dict[int, str], first: list[int]
) -> None:
    assert list(find_dead(seen, gone, asked, host_of)) == first


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("guilty_is_here", [True, False])
def test_of_an_attempt_the_rank_is_named_that_died_without_a_word(order: Sequence[int], guilty_is_here: bool) -> None:
    """One that had lost another rank died first, and one was left and had to be killed."""
    first, killed, guilty = order
    hosts = (Host("localhost", 2 + guilty_is_here), *([] if guilty_is_here else [Host("b", 1)]))
    place = dict.fromkeys(order, "localhost") | {guilty: hosts[-1].name}
    started = Attempt(hosts=hosts, codes=[1])
    options = Options(np=3, hosts=hosts, min_np=1, command=("python", "train.py"))
    running = Running(started, "job", options, Signals((), ()))
    states = {number: rank(number) for number in order} | {first: rank(first, error=LOST_PEER)}
    for number in order:
        running.note(place[number], states[number])
    started.dead, running._killed = (first,), {killed}
    answers = [
        Answer(host=host.name, ranks=tuple(states[number] for number in order if place[number] == host.name))
        for host in hosts
    ]
    running._conclude(answers)
    name = f"rank {guilty} on {place[guilty]}"
    assert started.judgement.text == f"{name} died without a word in update 10"

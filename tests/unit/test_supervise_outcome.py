"""How an attempt has ended, by exit codes and heartbeats."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest

from trainer.ops.supervise.attempt import find_dead
from trainer.ops.supervise.hosts import Host
from trainer.ops.supervise.outcome import OURS, Attempt, Judgement, judge
from trainer.ops.verdict import DIFFERENT, HANG, JobVerdict
from trainer.watch.heartbeat import LOST_PEER, MISTAKE, Heartbeat

ORDERS = list(permutations(range(3)))
HOSTS = (Host("a", 1), Host("b", 1), Host("c", 1))
ADVICE = "; `trainer doctor -H a:1,b:1,c:1` looks for the cause on these hosts and between them"


def rank(number: int, **reported: Any) -> Heartbeat:
    values = {"updates": 9, "first_update": 1, "phase": "training", **reported}
    return Heartbeat(pid=100 + number, rank=number, **values)


def told(number: int, message: str) -> Heartbeat:
    return rank(number, error="TrainerError", message=message)


def judged(*ranks: Heartbeat, **seen: Any) -> Judgement:
    by_number = {heartbeat.rank: heartbeat for heartbeat in ranks}
    return judge(Attempt(hosts=HOSTS, ranks=by_number, host_of={number: "abc"[number] for number in by_number}, **seen))


R0, R1, LOST0, SAVED0 = rank(0), rank(1), rank(0, error=LOST_PEER), rank(0, phase="preempted")
DONE0, DONE1 = rank(0, phase="done"), rank(1, phase="done")
OUT0, OUT1 = (rank(number, error="MemoryError") for number in (0, 1))
KEY0 = rank(0, error="KeyError", message="'x'\nmore", updates=0, first_update=0)
ODD, TIE = (f"the weights of rank 1 on host b are not those of rank 0{host}, first in w" for host in ("", " on host a"))
WRONG1 = rank(1, error=MISTAKE, message="lr is 0")
FAILS = {"codes": [1]}
DIES = {"codes": [137], "dead": [1]}
SILENT = "rank 1 on b died without a word in update 10 (SIGKILL)"
ENDS = "horovodrun has ended with code"
IDLE = "no progress for 60 s; furthest behind:"


def hang(*culprits: int) -> dict[str, Any]:
    return {"codes": [143], "dead": [1], "verdict": JobVerdict(HANG, "stuck", culprits)}


@pytest.mark.parametrize(
    ("ranks", "seen", "verdict", "code", "hosts", "text"),
    [
        # What was asked for, and mistakes, are not started again.
        ([DONE0], {"codes": [0]}, "done", 0, "", "done"),
        ([R0], {"codes": [0], "is_preempted": True}, "done", 0, "", "done"),
        # The ranks have saved, or had nothing to save: else the code is another one.
        ([SAVED0], {"codes": [1], "is_preempted": True}, "preempted", 75, "", "preempted"),
        ([rank(0, first_update=0)], {"codes": [1], "is_preempted": True}, "preempted", 75, "", "preempted"),
        ([R0], {"codes": [1], "is_preempted": True}, "failed", 1, "", f"preempted, and not saved: {ENDS} 1{ADVICE}"),
        ([R0], {"codes": [1], "was_interrupted": True}, "interrupted", 1, "", "interrupted"),
        ([R0, WRONG1], FAILS, "mistake", 78, "", "rank 1 on b: lr is 0"),
        *(([], {"codes": [code]}, "mistake", code, "", f"{ENDS} {code}") for code in (2, 78, 126, 127)),
        # Ranks that save by themselves are, but not where a launcher has ended them after a death.
        *(([SAVED0], {"codes": codes}, "preempted", None, "", "the ranks have saved, ") for codes in ([75], [], [1])),
        ([SAVED0, R1], DIES, "failed", None, "b", SILENT),
        # Errors, without those that follow from another.
        (
            [LOST0, OUT1],
            {"codes": [1], "dead": [0]},
            "failed",
            None,
            "b",
            "rank 1 on b failed in update 10: MemoryError",
        ),
        ([KEY0], FAILS, "failed", None, "a", "rank 0 on a failed before its first update: KeyError: 'x'"),
        ([OUT0, OUT1], {"verdict": JobVerdict(DIFFERENT, "other")}, "failed", None, "", "rank 0 on a failed in update"),
        # An error that all ranks raise is of the rank that it names; of two, nobody can say whose it is.
        (
            [told(0, ODD), told(1, ODD)],
            FAILS,
            "failed",
            None,
            "b",
            f"rank 1 on b failed in update 10: TrainerError: {ODD}",
        ),
        (
            [told(0, TIE), told(1, TIE), rank(2)],
            FAILS,
            "failed",
            None,
            "",
            f"rank 0 on a and rank 1 on b failed in update 10: TrainerError: {TIE}",
        ),
        # Deaths, and the launcher's end.
        ([R0, R1], DIES, "failed", None, "b", SILENT),
        (
            [R0, DONE1],
            {"dead": [0], "left": [1]},
            "failed",
            None,
            "",
            "rank 0 on a died without a word in update 10, after",
        ),
        ([OUT0], {"codes": [1], "lost": {"b": "no route"}}, "failed", None, "b", f"host b is lost: no route{ADVICE}"),
        ([], {"codes": [137]}, "failed", None, "", f"{ENDS} 137 (SIGKILL), before a rank had joined"),
        ([], FAILS, "failed", None, "", f"{ENDS} 1, before a rank had joined{ADVICE}"),
        ([DONE0], {"codes": [0, 3], "dead": [0]}, "failed", None, "", f"{ENDS} 3{ADVICE}"),
        # Hangs.
        (
            [],
            {"idle_s": 60.0},
            "hung",
            None,
            "",
            "no progress for 60 s: no rank has come to trainer.init "
            "(--timeout is for scripts that do, and with a /tmp that this process sees)"
            f"{ADVICE}",
        ),
        (
            [rank(0, phase="joining")],
            {"idle_s": 9.0},
            "hung",
            None,
            "",
            f"no progress for 9 s: not all ranks have (not 1, 2) come to trainer.init{ADVICE}",
        ),
        ([R0, rank(1, updates=8)], {"idle_s": 60.0}, "hung", None, "b", f"{IDLE} rank 1 on b (training), in update 9"),
        ([rank(0, reports=2), R1], {"idle_s": 60.0}, "hung", None, "b", f"{IDLE} rank 1 on b (training), in update 10"),
        ([R0, R1], {"idle_s": 60.0}, "hung", None, "", f"{IDLE} rank 0 on a (training), rank 1 on b "),
        ([LOST0, R1], hang(1), "hung", None, "b", "stuck"),
        ([R0, R1], hang(0, 1), "hung", None, "", f"stuck{ADVICE}"),
        ([R0, R1], hang(), "hung", None, "", f"stuck{ADVICE}"),
    ],
)
def test_how_an_attempt_has_ended(
    ranks: Sequence[Heartbeat], seen: dict[str, Any], verdict: str, code: int | None, hosts: str, text: str
) -> None:
    told = judged(*ranks, **seen)
    assert (told.verdict, told.code, told.hosts) == (verdict, code, tuple(hosts))
    assert told.text.startswith(text)
    assert text.startswith(IDLE) or told.text.endswith(ADVICE) == text.endswith(ADVICE)


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


def test_the_signal_that_ends_the_others_is_not_that_of_the_rank_that_died() -> None:
    """As of a rank that has called os._exit(0), for which a launcher has no other code."""
    died = "rank 1 on b died without a word in update 10"
    assert [judged(R0, R1, codes=[128 + code], dead=[1]).text for code in (OURS, 11)] == [died, f"{died} (SIGSEGV)"]


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

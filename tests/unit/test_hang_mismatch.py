"""Why a collective has failed: ranks that called another one are named, and those of a healthy job never are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from trainer.ops.watcher.job import Doing, Host, View
from trainer.ops.watcher.judge import explain
from trainer.watch.heartbeat import State

STEP = ("gradients", "all_reduce 10", "step")
EVALUATION = ("all_reduce 4", "broadcast")
PROGRAM = (*STEP, *STEP, *EVALUATION, *STEP)


def at(place: int, program: Sequence[str] = PROGRAM, rank: int = 0, state: int = State.WAITING) -> View:
    """A rank that has done so many things of a program, and is in the next; at its end it has ended."""
    counted = [each.partition(" ") for each in program[:place] if each not in ("gradients", "step")]
    facts: dict[str, Any] = {"rank": rank, "collectives": len(counted), "steps": program[:place].count("step")}
    if counted:
        facts |= {"last": counted[-1][0], "last_elements": int(counted[-1][2] or 0)}
    if place == len(program):
        return View(is_at_end=True, doing=Doing.ENDED, **facts)
    if program[place] == "step":
        return View(doing=Doing.GONE, **facts)
    what, _, elements = program[place].partition(" ")
    failures = int(state == State.FAILED)
    facts |= {"what": what, "elements": int(elements or 0), "is_counted": what != "gradients", "failures": failures}
    return View(state=state, **facts)


def failed(place: int, program: Sequence[str] = PROGRAM, rank: int = 0) -> View:
    return at(place, program, rank, State.FAILED)


def explained(*views: View) -> tuple[str, ...]:
    return explain(Host("a", {view.rank: view for view in views}))


def test_ranks_of_one_program_are_never_blamed_wherever_they_are() -> None:
    for first, second, third in itertools.product(range(len(PROGRAM) + 1), repeat=3):
        assert explained(failed(first), at(second, rank=1), at(third, rank=2)) == (), (first, second, third)


@pytest.mark.parametrize(
    ("other", "place", "others_at", "said"),
    [
        (("gradients", "step", *STEP, *EVALUATION), 2, 1, "called the gradients of step 2"),
        (("gradients", "all_reduce 10", "all_reduce 10", "step"), 2, 3, "called all_reduce of 10 elements (coll"),
        (("gradients", "all_reduce 11", "step"), 1, 1, "called all_reduce of 11 elements"),
        (("gradients", "barrier", "step"), 1, 1, "called barrier (collective 1, after step 0)"),
        ((*STEP,), 3, 3, "has ended: its script has reached its end, or has called sys.exit"),
        ((*STEP, "gradients"), 4, 4, "has ended: its script has reached its end, or has called sys.exit"),
    ],
)
@pytest.mark.parametrize("state", [State.FAILED, State.WAITING])
def test_the_rank_with_another_program_is_named(
    other: Sequence[str], place: int, others_at: int, said: str, state: int
) -> None:
    views = [failed(others_at, rank=rank) for rank in (0, 2)]
    lines = explained(views[0], at(place, other, rank=1, state=state), views[1])
    assert lines[0].startswith(f"rank 1 on a {said}")
    assert lines[1].startswith("ranks 0, 2 called ")
    assert lines[2].startswith("every rank has to ")
    assert len(lines) == 3


ELEVEN = ("gradients", "all_reduce 11")
THROUGH = View(rank=2, doing=Doing.GONE, collectives=1, steps=1, last="all_reduce", last_elements=10)


@pytest.mark.parametrize(
    ("views", "named"),
    [
        # Of two ranks both, but if one has ended, that one.
        ([failed(1), at(1, ELEVEN, rank=1)], [0, 1]),
        ([failed(3), at(3, STEP, rank=1)], [1]),
        # A broadcast's root does not wait for the others: who has ended is behind nobody.
        ([failed(4, (*STEP, "broadcast", "barrier")), at(3, STEP, rank=1)], [1]),
        # One that is somewhere else, and knows nothing; one that has come through is a witness.
        ([at(1), failed(1, ELEVEN, rank=1), View(rank=2, doing=Doing.GONE, collectives=4)], [0, 1]),
        ([at(1), failed(1, ELEVEN, rank=1), THROUGH], [1]),
        ([replace(THROUGH, rank=0), failed(1, ELEVEN, rank=1), THROUGH], [1]),
    ],
)
def test_the_majority_tells_who_is_named(views: list[View], named: list[int]) -> None:
    lines = explained(*views)
    assert [int(line.split()[1]) for line in lines if " on a " in line] == named
    assert len(lines) == 3


@pytest.mark.parametrize(
    "views",
    [
        (at(1), at(1, ELEVEN, rank=1)),  # nothing has failed
        (failed(1), View(rank=1), at(1, rank=2)),  # who was in no collective has said why itself
        (failed(1), View(rank=1, doing=Doing.GONE), at(1, rank=2)),
        (failed(6), replace(failed(4, rank=1), is_at_end=True)),  # it has caught the error, and ends because of it
        # Who has gone on after an error neither fails nor witnesses.
        (at(1), replace(at(1, ELEVEN, rank=1), failures=1), View(rank=2, doing=Doing.GONE)),
        (at(1), replace(failed(1, ELEVEN, rank=1), failures=2)),
        # The last average of weights, and a backward pass without a step, of which the other rank is at its end.
        *(
            (
                View(rank=0, state=State.FAILED, what=what, steps=steps, collectives=4, last="barrier", failures=1),
                View(rank=1, is_at_end=True, doing=Doing.ENDED, steps=steps, collectives=4, last="barrier"),
            )
            for what, steps in (("weights", 5), ("gradients", 0))
        ),
    ],
)
def test_nothing_is_said_where_ranks_may_have_called_the_same(views: tuple[View, ...]) -> None:
    assert explained(*views) == ()

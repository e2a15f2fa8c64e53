"""Why a collective has failed: ranks that called another one are named, and those of a healthy job never are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from trainer.ops.watcher.job import Host, View
from trainer.ops.watcher.judge import explain, has_failed
from trainer.watch import heartbeat
from trainer.watch.heartbeat import BATCH_NORM, State

STEP = ("gradients", "all_reduce 10", "step")
EVALUATION = ("all_reduce 4", "broadcast")
PROGRAM = (*STEP, *STEP, *EVALUATION, *STEP)


def at(place: int, program: Sequence[str] = PROGRAM, rank: int = 0, state: int = State.WAITING) -> View:
    """A rank that has done so many things of a program, and is in the next; at its end it has ended."""
    done = program[:place]
    counts: dict[str, Any] = {
        "collectives": sum(one not in ("gradients", "step") for one in done),
        "steps": done.count("step"),
    }
    counted = [one for one in done if one not in ("gradients", "step")]
    if counted:
        counts["last"], _, elements = counted[-1].partition(" ")
        counts["last_elements"] = int(elements or 0)
    if place == len(program):
        return View(rank=rank, is_at_end=True, process="X", **counts)
    if program[place] == "step":
        return View(rank=rank, process="X", **counts)
    what, _, elements = program[place].partition(" ")
    counts["is_counted"] = what != "gradients"
    failures = int(state == State.FAILED)
    return View(rank=rank, state=state, what=what, elements=int(elements or 0), failures=failures, **counts)


def explained(*views: View) -> tuple[str, ...]:
    return explain(Host("a", {view.rank: view for view in views}))


def test_ranks_of_one_program_are_never_blamed_wherever_they_are() -> None:
    failed = False
    for first, second, third in itertools.product(range(len(PROGRAM) + 1), repeat=3):
        views = (at(first, rank=0, state=State.FAILED), at(second, rank=1), at(third, rank=2))
        failed |= has_failed(views)
        assert explained(*views) == (), (first, second, third)
    assert failed


@pytest.mark.parametrize(
    ("other", "place", "others_at", "said"),
    [
        (("gradients", "step", *STEP, *EVALUATION), 2, 1, "called the gradients of step 2"),
        (
            ("gradients", "all_reduce 10", "all_reduce 10", "step"),
            2,
            3,
            "called all_reduce of 10 elements at the start",
        ),
        (("gradients", "all_reduce 11", "step"), 1, 1, "called all_reduce of 11 elements"),
        (("gradients", "barrier", "step"), 1, 1, "called barrier at the start (collective 1, after step 0)"),
        ((*STEP,), 3, 3, "has ended: its script has reached its end, or has called sys.exit"),
        ((*STEP, "gradients"), 4, 4, "has ended: its script has reached its end, or has called sys.exit"),
    ],
)
@pytest.mark.parametrize("state", [State.FAILED, State.WAITING])
def test_the_rank_with_another_program_is_named(
    other: Sequence[str], place: int, others_at: int, said: str, state: int
) -> None:
    views = [at(others_at, rank=rank, state=State.FAILED) for rank in (0, 2)]
    wrong = at(place, other, rank=1, state=state)
    lines = explained(views[0], wrong, views[1])
    assert lines[0].startswith(f"rank 1 on a {said}")
    assert lines[1].startswith("ranks 0, 2 called ")
    assert lines[2].startswith("every rank has to ")
    assert len(lines) == 3


def test_who_has_ended_early_is_behind_nobody() -> None:
    ahead = at(4, (*STEP, "broadcast", "barrier"), state=State.FAILED)  # whose root does not wait for the others
    lines = explained(ahead, at(3, STEP, rank=1), ahead.replaced(rank=2))
    assert lines[0].startswith("rank 1 on a has ended")
    assert lines[1].startswith("ranks 0, 2 called barrier")


def test_of_two_ranks_the_one_that_has_ended_is_the_cause() -> None:
    lines = explained(at(3, rank=0, state=State.FAILED), at(3, STEP, rank=1))
    assert [line.partition(" on ")[0] for line in lines[:2]] == ["rank 1", "rank 0 called the gradients of step 2"]


def test_who_ends_because_a_collective_has_failed_is_not_the_cause() -> None:
    caught = at(4, rank=1, state=State.FAILED).replaced(is_at_end=True)
    assert explained(at(6, rank=0, state=State.FAILED), caught) == ()


def test_of_two_ranks_both_are_named() -> None:
    lines = explained(at(1, rank=0, state=State.FAILED), at(1, ("gradients", "all_reduce 11"), rank=1))
    assert [line.partition(" on ")[0] for line in lines[:2]] == ["rank 0", "rank 1"]
    assert len(lines) == 3


def test_a_forward_pass_with_batch_norm_on_one_rank_alone_has_a_remedy() -> None:
    normalizes = at(1, ("gradients", "all_reduce 9"), rank=1).replaced(what=BATCH_NORM)
    assert "model.eval()" in explained(at(1, rank=0, state=State.FAILED), normalizes)[-1]


def test_a_job_that_has_not_failed_is_not_explained() -> None:
    views = (at(1, rank=0), at(1, ("gradients", "all_reduce 11"), rank=1))
    assert not has_failed(views)
    assert explained(*views) == ()


@pytest.mark.parametrize("process", ["S", "X"])
def test_a_rank_that_was_in_no_collective_has_said_why_itself(process: str) -> None:
    outside = View(rank=1, process=process)
    assert explained(at(1, rank=0, state=State.FAILED), outside, at(1, rank=2)) == ()


@pytest.mark.parametrize("third", [{}, {2: View(rank=2, process="X", collectives=1)}])
def test_of_ranks_that_are_somewhere_else_nothing_is_needed(third: dict[int, View]) -> None:
    wrong = at(1, ("gradients", "all_reduce 11"), rank=1, state=State.FAILED)
    lines = explain(Host("a", {0: at(1), 1: wrong, **third}))
    assert [line.partition(" on ")[0] for line in lines[:2]] == ["rank 0", "rank 1"]


def test_a_rank_that_has_come_through_is_a_witness() -> None:
    wrong = at(1, ("gradients", "all_reduce 11"), rank=1, state=State.FAILED)
    through = View(rank=2, process="X", collectives=1, steps=1, last="all_reduce", last_elements=10)
    lines = explained(at(1), wrong, through)
    assert [line.partition(" called")[0] for line in lines[:-1]] == ["rank 1 on a", "ranks 0, 2"]
    beyond = at(3, ("gradients", "all_reduce 11", "step", "gradients"), rank=1)
    assert (
        "rank 1 on a called all_reduce of 11 elements at the start (collective 1"
        in explained(at(1).replaced(process="X"), beyond)[1]
    )
    lines = explained(through.replaced(rank=0), wrong, through)
    assert lines[:-1] == (
        "rank 1 on a called all_reduce of 11 elements at the start (collective 1, after step 0)",
        "ranks 0, 2 called all_reduce of 10 elements at the start (collective 1, after step 0)",
    )
    assert explained(at(1), wrong, through.replaced(last_elements=9))[1].startswith("rank 1 on a")


def test_a_rank_that_the_transport_has_aborted_has_failed() -> None:
    assert has_failed([View(rank=0, process="X")])
    assert not has_failed([View(rank=0, process="X", is_at_end=True)])


def test_many_ranks_are_shown_in_part() -> None:
    views = [at(1, rank=rank, state=State.FAILED) for rank in range(40)]
    views += [at(1, ("gradients", f"all_reduce {rank}"), rank=rank) for rank in range(40, 60)]
    lines = explained(*views)
    assert sum(line.startswith("rank 4") for line in lines) == 8
    assert "and 12 more ranks" in lines
    assert "15, … called all_reduce of 10 elements" in lines[-2]


def test_a_rank_that_fails_later_is_at_the_same_place() -> None:
    """As the heartbeats say it: of two ranks in one collective, one has its error, and one still waits."""
    views = {}
    for rank, moment in enumerate(("waits", "failed", "went on")):
        record = heartbeat.open_record(rank)
        for _ in range(2):
            with heartbeat.waits("broadcast", counts=True):
                pass
        with suppress(ValueError), heartbeat.waits("all_reduce", 10, counts=True):
            if moment == "waits":
                views[rank] = view_of(record)
            raise ValueError
        if moment == "went on":
            with heartbeat.waits("barrier", counts=True):
                views[rank] = view_of(record)
        views.setdefault(rank, view_of(record))
        heartbeat.close_record()
    assert [view.failures for view in views.values()] == [0, 1, 1]
    assert [view.last for view in views.values()] == ["broadcast", "broadcast", "all_reduce"]
    assert explained(*views.values()) == ()


def view_of(record: Path | None) -> View:
    view = View.from_bytes(record.read_bytes()) if record is not None else None
    assert view is not None
    return view


def test_who_has_gone_on_after_an_error_neither_fails_nor_witnesses() -> None:
    wrong = at(1, ("gradients", "all_reduce 11"), rank=1)
    assert explained(at(1, rank=0), wrong.replaced(failures=1), View(rank=2, process="X")) == ()
    assert explained(at(1, rank=0), wrong.replaced(failures=2, state=State.FAILED)) == ()
    assert explained(at(1, rank=0), wrong.replaced(failures=1, state=State.FAILED)) != ()


def test_a_rank_that_most_contradict_is_named_alone() -> None:
    extra = at(2, ("gradients", "all_reduce 10", "all_reduce 10"), rank=1)
    computing = View(rank=2, collectives=1, steps=1, last="all_reduce", last_elements=10)
    lines = explained(at(3, rank=0, state=State.FAILED), extra, computing)
    assert [line.partition(" called")[0] for line in lines[:-1]] == ["rank 1 on a", "rank 0"]


@pytest.mark.parametrize("steps", [0, 5])
def test_a_last_average_of_weights_or_a_backward_without_a_step_blames_nobody(steps: int) -> None:
    ended = View(rank=1, is_at_end=True, process="X", steps=steps, collectives=4, last="barrier")
    what = "weights" if steps else "gradients"
    failed = View(rank=0, state=State.FAILED, what=what, steps=steps, collectives=4, last="barrier", failures=1)
    assert explained(failed, ended) == ()

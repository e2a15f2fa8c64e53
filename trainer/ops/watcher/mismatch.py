"""Why a collective has failed, from views of all ranks: some of them called another collective. No processes.

MPI, Gloo and Horovod end a job whose ranks call different collectives with an error about lengths or connections, which
names no rank. What the ranks had noted before tells which of them it was.

Ranks of a healthy job that fails are not at the same place either: one has its result a moment earlier, and waits in
the next collective. But whoever is ahead has been through what the others wait in. Where neither of two ranks has been
through what the other waits in, they have called different collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from trainer.cluster.processes import GONE
from trainer.ops.watcher.job import Host, View, names_of, views_of
from trainer.ops.watcher.words import EARLY_END, HAS_ENDED, MOST_NAMED, grouped, list_of, name, same_collectives
from trainer.watch.heartbeat import State


def explain(hosts: Sequence[Host]) -> tuple[str, ...]:
    """Return what to say of a job that has failed; nothing where its ranks may have called the same collectives.

    Args:
        hosts: of the job, with what each rank did last.
    """
    # Who has caught an error of a collective, and gone on, tells nothing about the others.
    known = views_of(hosts).items()
    views = {rank: view for rank, view in known if view.failures <= (view.state == State.FAILED)}
    different = _different(views) if has_failed(views.values()) else {}
    if not different:
        return ()
    names = names_of(hosts)
    behind = min(different.values(), key=lambda view: view.collectives)
    called = {rank: _called_beside(behind, view) for rank, view in views.items()}
    others = {rank: view for rank, view in called.items() if rank not in different and _place(view).is_in}
    lines = []
    for rank in list(different)[:MOST_NAMED]:
        is_over = _place(called[rank]).has_ended
        lines.append(f"{names[rank]} {HAS_ENDED if is_over else f'called {name(called[rank])}'}")
    if len(different) > MOST_NAMED:
        lines.append(f"and {len(different) - MOST_NAMED} more ranks")
    lines += [f"{list_of(ranks)} called {what}" for what, ranks in grouped(name, others).items()]
    has_ended = any(_place(view).has_ended for view in different.values())
    return (*lines, EARLY_END if has_ended else same_collectives(different.values()))


def has_failed(views: Iterable[View]) -> bool:
    """Return whether a rank has failed: in a collective, or because its process has gone."""
    return any(view.state == State.FAILED or (view.process == GONE and not view.is_at_end) for view in views)


class _Place(NamedTuple):
    """Where in its script a rank was."""

    is_in: bool
    """In a collective. A rank whose script has caught an error of one, and has ended by it, is still there."""
    has_ended: bool
    collective: tuple[str, int]
    """Its name and elements."""
    last: tuple[str, int]
    """The one before, of those that are counted."""
    collectives: int
    steps: int
    is_in_counted: bool


def _place(view: View) -> _Place:
    is_in = view.state in (State.WAITING, State.FAILED)
    return _Place(
        is_in=is_in,
        has_ended=view.is_at_end and view.state != State.FAILED,
        collective=(view.what, view.elements) if is_in else ("", 0),
        last=(view.last, view.last_elements),
        collectives=view.collectives,
        steps=view.steps,
        is_in_counted=is_in and view.is_counted,
    )


def _different(views: Mapping[int, View]) -> dict[int, View]:
    """Return the ranks that are contradicted by more others than agree with them; where they are two halves, all ranks.

    If some of them have ended too early, only these are returned.
    """
    ranks_at = Counter(map(_place, views.values()))
    against = {place: {other for other in ranks_at if not _are_in_order(place, other)} for place in ranks_at}
    doubts = {place: sum(ranks_at[other] for other in others) for place, others in against.items()}
    different = set()
    for place, others in against.items():
        if not others or not (place.is_in or place.has_ended):
            continue
        agree = sum(ranks for other, ranks in ranks_at.items() if other == place or _has_been_through(other, place))
        if doubts[place] >= max(agree, *(doubts[other] for other in others)):
            different.add(place)
    different = {place for place in different if place.has_ended} or different
    return {rank: view for rank, view in views.items() if _place(view) in different}


def _has_been_through(other: _Place, place: _Place) -> bool:
    return place.is_in_counted and other.collectives == place.collectives + 1 and other.last == place.collective


def _are_in_order(place: _Place, other: _Place) -> bool:
    return place == other or _is_past(place, other) or _is_past(other, place)


def _is_past(ahead: _Place, behind: _Place) -> bool:
    """Return whether a rank at one place may have been through what a rank at the other waits in."""
    if behind.has_ended:
        return False
    if behind.is_in_counted and ahead.collectives == behind.collectives + 1 and ahead.last != behind.collective:
        return False
    # A step follows the gradients, where an optimizer of the library's takes it.
    is_stepped = behind.steps > 0 and behind.collective[0] == "gradients"
    steps = behind.steps + (ahead.has_ended and is_stepped)
    return ahead.collectives >= behind.collectives + behind.is_in_counted and ahead.steps >= steps


def _called_beside(behind: View, view: View) -> View:
    """Return a rank as it was in the collective that `behind` is still in, if it has been through it."""
    if not _place(behind).is_in_counted or view.collectives != behind.collectives + 1:
        return view
    return view.replaced(
        what=view.last,
        elements=view.last_elements,
        state=behind.state,
        is_counted=True,
        collectives=behind.collectives,
        steps=behind.steps,
    )

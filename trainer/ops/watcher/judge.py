"""The judge: which ranks keep the others waiting, or have made a collective fail. From views; no processes, no clock.

It sees the ranks of one host. Of a job that hangs: those that do not wait in a collective although their time is over
are the cause, whatever the waiting ranks look like. If all ranks of the host wait, the cause may be on another host. If
they wait in different collectives, the minority is named; but on a job of several hosts these may be of process groups
that wait for a rank elsewhere. Collectives of process groups that are known to be different are not compared.

Of a job that fails: MPI, Gloo and Horovod end a job whose ranks call different collectives with an error about lengths
or connections, which names no rank. What the ranks had noted before tells which of them it was. Ranks of a healthy job
that fails are not at the same place either: one has its result a moment earlier, and waits in the next collective. But
whoever is ahead has been through what the others wait in. Where neither of two ranks has been through what the other
waits in, they have called different collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainer.cluster.processes import GONE
from trainer.ops.watcher.job import STOPPED, TRACED, UNINTERRUPTIBLE, WORKS, Host, View
from trainer.watch.heartbeat import BATCH_NORM, SAVING, TRAINING, State
from trainer.watch.stack import is_users

_MOST_NAMED = 8
"""How many ranks are named one by one."""
_MOST_FRAMES, _MOST_PLACES, _INNERMOST = 6, 4, 2
_SAME_COLLECTIVES = "every rank has to call the same collectives in the same order, with tensors of the same shape"
_BATCH_NORM = (
    "sync_batch_norm makes a forward pass in training mode collective: call it on all ranks, or model.eval() before a "
    "forward pass on one rank alone"
)
_ENDED = "ended"
_HAS_ENDED = "has ended: its script has reached its end, or has called sys.exit"
_EARLY_END = "every rank has to take as many steps, and to call the same collectives, before it ends"
_KNOWN = {
    _ENDED: (_HAS_ENDED, _EARLY_END),
    GONE: ("is gone: its process has ended", "see why it has ended before the others"),
    STOPPED: ("is stopped (by SIGSTOP or Ctrl-Z)", "kill -CONT lets it go on, if you have stopped it"),
    UNINTERRUPTIBLE: (
        "is in uninterruptible sleep: a disk or a network file system does not answer",
        "look at the disks and network file systems of its host (dmesg)",
    ),
}
"""By the reason for a rank's absence: what the rank does, and the advice. Such a rank is not asked for its stack."""


@dataclass(frozen=True)
class Verdict:
    """The lines to print, and the ranks to blame."""

    lines: tuple[str, ...]
    culprits: tuple[int, ...]
    """Empty where all ranks wait in the same collective."""
    is_sure: bool = True
    """False if the wait may end by itself, as it may be due to a slow network, a slow disk, or a rank at work."""
    waits_for: str = ""
    """What all ranks of this host wait for, if the cause may be on another host."""

    @property
    def first(self) -> str:
        return self.lines[0]


def judge(host: Host, idle_s: float) -> Verdict | None:
    """Return the verdict on ranks without progress for `idle_s` seconds; None where no rank waits for another."""
    waiting, absent = _waiting_and_absent(host)
    if not waiting and not absent:
        return None
    views, names = host.views, host.names
    blamed = absent or {rank: _reason(waiting[rank]) for rank in _minority(waiting)}
    others = {rank: view for rank, view in waiting.items() if rank not in blamed}
    lines = [f"no progress for {idle_s:.0f} s: {_summary(host, blamed, waiting, others)}"]
    for rank, why in list(blamed.items())[:_MOST_NAMED]:
        lines.append(f"{names[rank]} {_what_it_does(views[rank], why, bool(others))}")
        lines += [f"    {frame}" for frame in _shown(views[rank].frames)]
    if len(blamed) > _MOST_NAMED:
        lines.append(f"and {len(blamed) - _MOST_NAMED} more ranks that did not come")
    for what, ranks in _grouped(_name_and_line, others).items():
        lines.append(f"{_list_of(ranks)} wait{'s' * (len(ranks) == 1)} for {what}")
    lines.append(f"what to do: {_advice(blamed, views, others)}")
    waits_for = "" if absent or host.is_whole_job else " and ".join(_grouped(_name_and_line, waiting))
    # Where no rank here waits, all ranks of the job may wait for a slow source of data.
    may_be_healthy = not waiting and all(view.state == State.LOADER for view in views.values())
    may_recover = may_be_healthy or any(_may_recover(views[rank]) for rank in blamed)
    return Verdict(tuple(lines), tuple(blamed), bool(blamed) and not may_recover, waits_for)


def notice(host: Host, idle_s: float, limit_s: float) -> str:
    """Return in one line which ranks wait, and what the others do; "" where it is not known whom they wait for.

    Args:
        idle_s: seconds without progress.
        limit_s: seconds without progress after which there will be a verdict.
    """
    waiting, absent = _waiting_and_absent(host)
    places = _grouped(_name_and_line, waiting)
    if not waiting or (not absent and len(places) == 1 and host.is_whole_job):
        return ""
    where = "" if host.is_whole_job else f" on {host.name}"
    parts = [
        f"{_list_of(ranks)}{where} {'have' if len(ranks) > 1 else 'has'} waited {idle_s:.0f} s for {what}"
        for what, ranks in list(places.items())[:_MOST_PLACES]
    ]
    for rank, why in list(absent.items())[:_MOST_PLACES]:
        parts.append(f"{host.names[rank]} {_where_it_is(host.views[rank], why)}")
    if len(absent) > _MOST_PLACES:
        parts.append(f"and {len(absent) - _MOST_PLACES} more ranks do not wait")
    if not absent and not host.is_whole_job:
        parts.append("the cause may be on another host")
    return f"{'; '.join(parts)}; the limit without progress is {limit_s:.0f} s"


def is_paused(host: Host) -> bool:
    """Return whether a debugger traces a rank of the host, or all its ranks are stopped, as by Ctrl-Z."""
    processes = [view.process for view in host.views.values()]
    return TRACED in processes or (bool(processes) and {*processes} == {STOPPED})


def has_failed(views: Iterable[View]) -> bool:
    """Return whether a rank has failed: in a collective, or because its process has gone."""
    return any(view.state == State.FAILED or (view.process == GONE and not view.is_at_end) for view in views)


def explain(host: Host) -> tuple[str, ...]:
    """Return what to say of a job that has failed; nothing where its ranks may have called the same collectives.

    Args:
        host: with what each of its ranks did last.
    """
    # Who has caught an error of a collective, and gone on, tells nothing about the others.
    views = {rank: view for rank, view in host.views.items() if view.failures <= (view.state == State.FAILED)}
    different = _contradicted(views) if has_failed(views.values()) else {}
    if not different:
        return ()
    names = host.names
    behind = min(different.values(), key=lambda view: view.collectives)
    called = {rank: _called_beside(behind, view) for rank, view in views.items()}
    others = {rank: view for rank, view in called.items() if rank not in different and _place(view).collective}
    lines = []
    for rank in list(different)[:_MOST_NAMED]:
        is_over = _place(called[rank]).has_ended
        lines.append(f"{names[rank]} {_HAS_ENDED if is_over else f'called {_name(called[rank])}'}")
    if len(different) > _MOST_NAMED:
        lines.append(f"and {len(different) - _MOST_NAMED} more ranks")
    lines += [f"{_list_of(ranks)} called {what}" for what, ranks in _grouped(_name, others).items()]
    has_ended = any(_place(view).has_ended for view in different.values())
    return (*lines, _EARLY_END if has_ended else _same_collectives(different.values()))


# Of a job that hangs.


def _waiting_and_absent(host: Host) -> tuple[dict[int, View], dict[int, str]]:
    """Return the views of waiting ranks, and by rank the reasons of those that most likely keep them waiting."""
    waiting = {rank: view for rank, view in host.views.items() if view.waits and view.process not in _KNOWN}
    absent = {rank: _reason(view) for rank, view in host.views.items() if rank not in waiting}
    if not waiting:
        # A whole job in which none waits runs. Else ranks of other hosts may wait for one of these, unless it has
        # ended, or ends because they have.
        ends = {rank for rank, why in absent.items() if why in (_ENDED, GONE)}
        ends |= {rank for rank, view in host.views.items() if view.state == State.FAILED}
        return {}, {} if host.is_whole_job else {rank: why for rank, why in absent.items() if rank not in ends}
    # If a rank has ended or is gone, the others may have failed because of it.
    for reason in (_ENDED, GONE):
        if likeliest := {rank: why for rank, why in absent.items() if why == reason}:
            return waiting, likeliest
    return waiting, absent


def _reason(view: View) -> str:
    """Return why a rank is absent or stuck, by its view; "" if it runs."""
    return _ENDED if view.is_at_end else view.process if view.process in _KNOWN else ""


def _minority(waiting: Mapping[int, View]) -> list[int]:
    """Return the minority of ranks that wait in another collective than the rest; in a tie, all ranks."""
    process_groups = {view.group if view.is_recorded else "" for view in waiting.values()}
    if len(process_groups - {""}) > 1:
        return []
    # A rank with a larger number has called the others' collective too, and has only completed it earlier: compare
    # ranks with the same number.
    is_numbered = "" not in process_groups
    places: dict[int, dict[int, View]] = {}
    for rank, view in waiting.items():
        places.setdefault(view.number if is_numbered else 0, {})[rank] = view
    minority = []
    for views in places.values():
        groups = Counter(view.collective for view in views.values()).most_common(2)
        is_tie = len(groups) > 1 and groups[0][1] == groups[1][1]
        minority += [rank for rank, view in views.items() if is_tie or view.collective != groups[0][0]]
    return sorted(minority)


def _may_recover(view: View) -> bool:
    """Return whether a blamed rank may join the others by itself."""
    return view.excuse == WORKS or view.process == UNINTERRUPTIBLE


def _shown(frames: Sequence[str]) -> list[str]:
    """Return the innermost frames, and those of the user's own files around them."""
    shown = {*frames[:_INNERMOST], *filter(is_users, frames)}
    return [frame for frame in frames if frame in shown][:_MOST_FRAMES]


def _summary(host: Host, blamed: Mapping[int, str], waiting: Mapping[int, View], others: Mapping[int, View]) -> str:
    who = " and ".join(host.names[rank] for rank in list(blamed)[:_MOST_NAMED])
    may_be_elsewhere = not blamed and not host.is_whole_job
    collectives = list(_grouped(_name_and_line if may_be_elsewhere else _name, others))
    if not blamed:
        which = collectives[0] if len(collectives) == 1 else "others"
        whose = f"all ranks{'' if host.is_whole_job else f' on {host.name}'}"
        what = f"{whose} wait for {which}, and none of them is missing"
    elif not waiting:
        what = f"{who} {'are' if len(blamed) > 1 else 'is'} in no collective, and ranks of other hosts may be in one"
    else:
        what = f"{who} did not come to {collectives[0]}" if others else f"{who} wait in different collectives"
    if not blamed or not (blamed.keys() - waiting.keys()):
        shown = {rank: view for rank, view in waiting.items() if rank in blamed or not blamed}
        if len(_grouped(_name_and_line, shown)) >= (1 if blamed and others else 2):
            what = f"{what}: {_places(shown)}"
    return f"{what}; the cause may be on another host" if may_be_elsewhere else what


def _places(waiting: Mapping[int, View]) -> str:
    """Return which ranks wait in what: "ranks 0, 2 in the gradients of step 8 at train.py:31, rank 1 in barrier"."""
    places = [f"{_list_of(ranks)} in {where}" for where, ranks in _grouped(_name_and_line, waiting).items()]
    return f"{', '.join(places[:_MOST_PLACES])}{', …' * (len(places) > _MOST_PLACES)}"


def _where_it_is(view: View, why: str) -> str:
    if why or view.state == State.FAILED:
        return _what_it_does(view, why, has_others=False).removesuffix(":")
    doing = "waits for its data" if view.state == State.LOADER else "is in user code"
    return f"{doing}{_line(view)}{_phase(view)}"


def _what_it_does(view: View, why: str, has_others: bool) -> str:
    if why:
        return _KNOWN[why][0]
    if view.state == State.FAILED:
        return f"has failed in {_name(view)}, and has not ended:"
    if view.waits:
        return f"waits for {_name(view)}{', which the others do not' if has_others else ''}"
    computes = "computes" if view.cpu > 0.5 else "does something else"
    doing = "waits for its data" if view.state == State.LOADER else computes
    return f"{doing}{_phase(view)}{':' if view.frames else ', and has not told its stack'}"


def _advice(blamed: Mapping[int, str], views: Mapping[int, View], others: Mapping[int, View]) -> str:
    if not blamed and len(_grouped(_name_and_line, others)) > 1:
        return _same_collectives(others.values())
    if not blamed:
        return "check the network between the hosts (`trainer doctor`), and whether the ranks' shapes are the same"
    rank, why = next(iter(blamed.items()))
    if why:
        return _KNOWN[why][1]
    if views[rank].waits:
        return _same_collectives(views.values())
    if views[rank].state == State.LOADER:
        return "look at the dataset and its workers; DataLoader's timeout= makes an error of a worker that hangs"
    return "look at the stack above; if it only takes long, give more time with TRAINER_HANG_TIMEOUT (seconds; 0: off)"


# Of a job that fails.


class _Place(NamedTuple):
    """Where in its script a rank was."""

    collective: tuple[str, int] | None
    """Name and elements of the one that it is in. If its script has caught its error, and has ended, it still is."""
    is_counted: bool
    """Whether that is one of those that are counted."""
    last: tuple[str, int]
    """The one before, of those that are counted."""
    collectives: int
    steps: int
    has_ended: bool


def _place(view: View) -> _Place:
    is_in = view.state in (State.WAITING, State.FAILED)
    return _Place(
        collective=(view.what, view.elements) if is_in else None,
        is_counted=is_in and view.is_counted,
        last=(view.last, view.last_elements),
        collectives=view.collectives,
        steps=view.steps,
        has_ended=view.is_at_end and view.state != State.FAILED,
    )


def _contradicted(views: Mapping[int, View]) -> dict[int, View]:
    """Return the ranks that are contradicted by more others than agree with them; where they are two halves, all ranks.

    If some of them have ended too early, only these are returned.
    """
    ranks_at = Counter(map(_place, views.values()))
    against = {place: {other for other in ranks_at if not _are_in_order(place, other)} for place in ranks_at}
    doubts = {place: sum(ranks_at[other] for other in others) for place, others in against.items()}
    different = set()
    for place, others in against.items():
        if not others or not (place.collective or place.has_ended):
            continue
        agree = sum(ranks for other, ranks in ranks_at.items() if other == place or _has_been_through(other, place))
        if doubts[place] >= max(agree, *(doubts[other] for other in others)):
            different.add(place)
    different = {place for place in different if place.has_ended} or different
    return {rank: view for rank, view in views.items() if _place(view) in different}


def _has_been_through(other: _Place, place: _Place) -> bool:
    return place.is_counted and other.collectives == place.collectives + 1 and other.last == place.collective


def _are_in_order(place: _Place, other: _Place) -> bool:
    return place == other or _is_past(place, other) or _is_past(other, place)


def _is_past(ahead: _Place, behind: _Place) -> bool:
    """Return whether a rank at one place may have been through what a rank at the other waits in."""
    if behind.has_ended:
        return False
    if behind.is_counted and ahead.collectives == behind.collectives + 1 and ahead.last != behind.collective:
        return False
    # A step follows the gradients, where an optimizer of the library's takes it.
    is_stepped = behind.steps > 0 and behind.collective is not None and behind.collective[0] == "gradients"
    steps = behind.steps + (ahead.has_ended and is_stepped)
    return ahead.collectives >= behind.collectives + behind.is_counted and ahead.steps >= steps


def _called_beside(behind: View, view: View) -> View:
    """Return a rank as it was in the collective that `behind` is still in, if it has been through it."""
    if not _place(behind).is_counted or view.collectives != behind.collectives + 1:
        return view
    return view.replaced(
        what=view.last,
        elements=view.last_elements,
        state=behind.state,
        is_counted=True,
        collectives=behind.collectives,
        steps=behind.steps,
    )


# What ranks, and the collectives that they are in, are called.


def _name(view: View) -> str:
    """Return what a rank waits for, as the user knows it."""
    if view.phase == SAVING:
        return f"the checkpoint ({view.what})"
    if view.phase == "evaluation" and view.what != "gradients":
        return f"the evaluation ({view.what})"
    steps = view.steps_before if view.is_recorded else view.steps
    if view.what == "gradients":
        return f"the gradients of step {steps + 1}"
    elements = f" of {view.elements:,} elements" if view.elements else ""
    start = " at the start" if steps == 0 else ""
    backend = view.group.partition(" ")[0] if view.is_recorded else ""
    which = f"{backend}'s collective {view.number}, " if backend else ""
    if view.is_counted:
        which = f"collective {view.collectives + 1}, "
    return f"{view.what}{elements}{start} ({which}after step {steps})"


def _name_and_line(view: View) -> str:
    return f"{_name(view)}{_line(view)}"


def _line(view: View) -> str:
    return f" at {view.at}" if view.at else ""


def _phase(view: View) -> str:
    return f" ({view.phase})" if view.phase not in TRAINING else ""


def _grouped(label: Callable[[View], str], views: Mapping[int, View]) -> dict[str, list[int]]:
    """Return the ranks that have the same label."""
    groups: dict[str, list[int]] = {}
    for rank, view in views.items():
        groups.setdefault(label(view), []).append(rank)
    return groups


def _list_of(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0, 1, 2, …"."""
    shown = ", ".join(map(str, ranks[: 2 * _MOST_NAMED])) + (", …" if len(ranks) > 2 * _MOST_NAMED else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _same_collectives(views: Iterable[View]) -> str:
    """Return the advice for ranks that have called different collectives."""
    return _BATCH_NORM if any(BATCH_NORM in (view.what, view.last) for view in views) else _SAME_COLLECTIVES

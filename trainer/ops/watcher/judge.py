"""The judge: which ranks keep the others waiting, or have made a collective fail. From views; no processes, no clock.

It sees the ranks of one host. Of a job that hangs: those that do not wait in a collective although their time is over
are the cause, whatever the waiting ranks look like. If all ranks of the host wait, the cause may be on another host. If
they wait in different collectives, the minority is named; but on a job of several hosts these may be of process groups
that wait for a rank elsewhere.

Of a job that fails: MPI, Gloo and Horovod end a job whose ranks call different collectives with an error about lengths
or connections, which names no rank. What the ranks had noted before tells which of them it was. Ranks of a healthy job
that fails are not at the same place either: one has its result a moment earlier, and waits in the next collective. But
whoever is ahead has been through what the others wait in. Where neither of two ranks has been through what the other
waits in, they have called different collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from trainer.ops.watcher.job import Doing, Host, View
from trainer.watch.heartbeat import TRAINING, State
from trainer.watch.stack import is_users

_MOST_SHOWN, _MOST_FRAMES, _INNERMOST = 8, 6, 2
"""Stacks that are printed, lines of each, and how many of these are the innermost, whosever they are."""
_SAME_COLLECTIVES = "every rank has to call the same collectives in the same order, with tensors of the same shape"
_EARLY_END = "every rank has to take as many steps, and to call the same collectives, before it ends"
_NETWORK = "check the network between the hosts (`trainer doctor`), and whether the ranks' shapes are the same"
_ADVICE = {
    Doing.ENDED: _EARLY_END,
    Doing.GONE: "see why it has ended before the others",
    Doing.STOPPED: "kill -CONT lets it go on, if you have stopped it",
    Doing.LOADS: "look at the dataset and its workers; DataLoader's timeout= makes an error of a worker that hangs",
}
_LOOK = "look at the stack above; if it only takes long, give more time with TRAINER_HANG_TIMEOUT (seconds; 0: off)"

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Verdict:
    """The lines to print, and the ranks to blame."""

    lines: tuple[str, ...]
    culprits: tuple[int, ...]
    """Empty where all ranks wait in the same collective, or the cause may be on another host."""
    waits_for: str = ""
    """What all ranks of this host wait for, if the cause may be on another host."""

    @property
    def notice(self) -> str:
        """Who does what, in one line."""
        return "; ".join(line for line in self.lines[1:-1] if not line.startswith(" "))


def judge(host: Host, idle_s: float) -> Verdict | None:
    """Return the verdict on ranks without progress for `idle_s` seconds; None where no rank waits for another."""
    waiting, absent = _waiting_and_absent(host)
    if not waiting and not absent:
        return None
    blamed = absent or _minority(waiting)
    others = {rank: view for rank, view in waiting.items() if rank not in blamed}
    lines = [f"no progress for {idle_s:.0f} s: {_headline(host, blamed, waiting, others)}"]
    for rank, view in list(blamed.items())[:_MOST_SHOWN]:
        lines += [f"{_list_of([rank], host)} {_statement(view)}", *(f"    {frame}" for frame in _shown(view.frames))]
    for what, ranks in _grouped(_name_and_line, others).items():
        lines.append(f"{_list_of(ranks, host)} wait{'s' * (len(ranks) == 1)} for {what}")
    places = _grouped(_name_and_line, waiting)
    waits_for = "" if absent or host.is_whole_job else " and ".join(places)
    if waits_for:
        lines.append("the cause may be on another host")
    if absent:
        advice = _ADVICE.get(next(iter(absent.values())).doing, _LOOK)
    else:
        advice = _NETWORK if len(places) == 1 else _SAME_COLLECTIVES
    return Verdict((*lines, f"what to do: {advice}"), () if waits_for else tuple(blamed), waits_for)


def explain(host: Host) -> tuple[str, ...]:
    """Return what to say of a job that has failed; nothing where its ranks may have called the same collectives.

    Args:
        host: with what each of its ranks did last.
    """
    # Who has caught an error of a collective, and gone on, tells nothing about the others.
    views = {rank: view for rank, view in host.views.items() if view.failures <= (view.state == State.FAILED)}
    has_failed = any(view.state == State.FAILED or view.doing is Doing.GONE for view in views.values())
    if not has_failed or not (different := _contradicted(views)):
        return ()
    behind = min(different.values(), key=lambda view: view.collectives)
    called = {rank: _called_beside(behind, view) for rank, view in views.items()}
    theirs = {rank: view for rank, view in called.items() if rank in different}
    others = {rank: view for rank, view in called.items() if rank not in different and _is_in_collective(view)}
    lines = [f"{_list_of(ranks, host)} {what}" for what, ranks in _grouped(_has_called, theirs).items()]
    lines += [f"{_list_of(ranks)} {what}" for what, ranks in _grouped(_has_called, others).items()]
    return (*lines, _EARLY_END if any(map(_has_ended, different.values())) else _SAME_COLLECTIVES)


# Of a job that hangs.


def _waiting_and_absent(host: Host) -> tuple[dict[int, View], dict[int, View]]:
    """Return the waiting ranks, and those that most likely keep them waiting."""
    waiting = {rank: view for rank, view in host.views.items() if view.doing is Doing.WAITS}
    absent = {rank: view for rank, view in host.views.items() if rank not in waiting}
    if not waiting:
        # A whole job in which none waits runs. Else ranks of other hosts may wait for one of these, unless it has
        # ended, or ends because they have.
        ends = (Doing.ENDED, Doing.GONE, Doing.FAILED)
        return {}, {} if host.is_whole_job else {r: view for r, view in absent.items() if view.doing not in ends}
    # If a rank has ended or is gone, the others may have failed because of it.
    for doing in (Doing.ENDED, Doing.GONE):
        if likeliest := {rank: view for rank, view in absent.items() if view.doing is doing}:
            return waiting, likeliest
    return waiting, absent


def _minority(waiting: Mapping[int, View]) -> dict[int, View]:
    """Return the ranks that wait in another collective than most; in a tie, all ranks.

    By the flight recorder, ranks are compared that wait for the same number of a process group: a rank with a
    larger number has called the others' collective too, and completed it earlier.
    """
    minority = set[int]()
    for ranks in _grouped(lambda view: view.is_recorded and view.what.partition(":")[0], waiting).values():
        groups = sorted(_grouped(_collective, {rank: waiting[rank] for rank in ranks}).values(), key=len)
        is_tie = len(groups) > 1 and len(groups[-1]) == len(groups[-2])
        minority |= {rank for rank in ranks if is_tie or rank not in groups[-1]}
    return {rank: view for rank, view in waiting.items() if rank in minority}


def _collective(view: View) -> tuple[object, ...]:
    """Return what is equal for ranks that wait in the same collective; by the recorder the program may be ahead."""
    return (view.what,) if view.is_recorded else (view.what, view.elements, view.collectives, view.steps)


def _shown(frames: Sequence[str]) -> list[str]:
    """Return the innermost frames, and those of the user's own files around them."""
    shown = {*frames[:_INNERMOST], *filter(is_users, frames)}
    return [frame for frame in frames if frame in shown][:_MOST_FRAMES]


def _headline(host: Host, blamed: Mapping[int, View], waiting: Mapping[int, View], others: Mapping[int, View]) -> str:
    who = _list_of([*blamed], host)
    if not blamed:
        what = f"all ranks on {host.name} wait, and none of them is missing"
    elif others:
        what = f"{who} did not come to {_name(next(iter(others.values())))}"
    elif waiting:
        what = f"{who} wait in different collectives"
    else:
        what = f"{who} {'are' if len(blamed) > 1 else 'is'} in no collective, and ranks of other hosts may be in one"
    shown = {rank: waiting[rank] for rank in blamed or waiting if rank in waiting}
    places = [f"{_list_of(ranks)} in {place}" for place, ranks in _grouped(_name_and_line, shown).items()]
    return f"{what}: {', '.join(places)}" if shown else what


def _statement(view: View) -> str:
    """Return what a rank that is to blame does."""
    if view.doing is Doing.WAITS:
        return f"waits for {_name_and_line(view)}"
    return f"{view.doing.value}{_line(view)}{f' ({view.phase})' if view.phase not in TRAINING else ''}"


# Of a job that fails.


def _is_in_collective(view: View) -> bool:
    """Return whether a rank is in a collective. If its script has caught its error, and has ended, it still is."""
    return view.state in (State.WAITING, State.FAILED)


def _has_ended(view: View) -> bool:
    return view.is_at_end and view.state != State.FAILED


def _contradicted(views: Mapping[int, View]) -> dict[int, View]:
    """Return the ranks that most others contradict; where they are two halves, all ranks.

    If some of them have ended too early, only these are returned.
    """
    doubts = {
        rank: sum(not _are_in_order(view, other) for other in views.values())
        for rank, view in views.items()
        if _is_in_collective(view) or _has_ended(view)
    }
    most = max(doubts.values(), default=0)
    different = {rank: views[rank] for rank, count in doubts.items() if count == most > 0}
    return {rank: view for rank, view in different.items() if _has_ended(view)} or different


def _are_in_order(one: View, other: View) -> bool:
    return _place(one) == _place(other) or _is_past(one, other) or _is_past(other, one)


def _place(view: View) -> tuple[object, ...]:
    """Return where in its script a rank was."""
    current = (view.what, view.elements, view.is_counted) if _is_in_collective(view) else None
    return (current, view.last, view.last_elements, view.collectives, view.steps, _has_ended(view))


def _is_past(ahead: View, behind: View) -> bool:
    """Return whether a rank may have been through what another waits in."""
    if _has_ended(behind):
        return False
    is_counted = _is_in_collective(behind) and behind.is_counted
    was_other = (ahead.last, ahead.last_elements) != (behind.what, behind.elements)
    if is_counted and ahead.collectives == behind.collectives + 1 and was_other:
        return False
    # A step follows the gradients, where an optimizer of the library's takes it.
    is_stepped = behind.steps > 0 and _is_in_collective(behind) and behind.what == "gradients"
    steps = behind.steps + (_has_ended(ahead) and is_stepped)
    return ahead.collectives >= behind.collectives + is_counted and ahead.steps >= steps


def _called_beside(behind: View, view: View) -> View:
    """Return a rank as it was in the collective that `behind` is still in, if it has been through it."""
    if not behind.is_counted or view.collectives != behind.collectives + 1:
        return view
    return replace(behind, what=view.last, elements=view.last_elements, rank=view.rank)


def _has_called(view: View) -> str:
    return Doing.ENDED.value if _has_ended(view) else f"called {_name(view)}"


# What ranks, and the collectives that they are in, are called.


def _name(view: View) -> str:
    """Return what a rank waits for, as the user knows it."""
    if view.is_recorded:
        return view.what
    if view.what == "gradients":
        return f"the gradients of step {view.steps + 1}"
    elements = f" of {view.elements:,} elements" if view.elements else ""
    facts = [f"collective {view.collectives + 1}"] if view.is_counted else []
    facts += [f"after step {view.steps}", *([view.phase] if view.phase not in TRAINING else [])]
    return f"{view.what}{elements} ({', '.join(facts)})"


def _name_and_line(view: View) -> str:
    return f"{_name(view)}{_line(view)}"


def _line(view: View) -> str:
    return f" at {view.at}" if view.at else ""


def _grouped(key: Callable[[View], Key], views: Mapping[int, View]) -> dict[Key, list[int]]:
    """Return the ranks that have the same key."""
    groups: dict[Key, list[int]] = {}
    for rank, view in views.items():
        groups.setdefault(key(view), []).append(rank)
    return groups


def _list_of(ranks: Sequence[int], host: Host | None = None) -> str:
    """Return "rank 3" or "ranks 0, 1, 2", and where."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}{f' on {host.name}' if host else ''}"

"""The verdict on a job, from views of all its ranks: which ranks keep the others waiting. No processes, no clock.

If some ranks wait in a collective, those that do not are absent, and are the cause, whatever the waiting ranks look
like. If all ranks wait, the cause is the minority that waits in another collective than the rest. Collectives of
different process groups are not compared, because ranks of one group may wait for those of another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.cluster.processes import GONE
from trainer.ops.watcher.job import UNREACHABLE, UNWATCHED, WORKS, Host, View, names_of, views_of
from trainer.ops.watcher.probe import STOPPED, TRACED, UNINTERRUPTIBLE, is_users
from trainer.ops.watcher.words import EARLY_END, HAS_ENDED, MOST_NAMED, grouped, list_of, name, place, same_collectives
from trainer.watch.heartbeat import TRAINING, State

_MOST_FRAMES, _MOST_PLACES, _INNERMOST = 6, 4, 2
_ENDED = "ended"
_ASK_DOCTOR = "check whether the host runs and can be reached (`trainer doctor`)"
_KNOWN = {
    UNREACHABLE: ("cannot be asked: host unreachable", _ASK_DOCTOR),
    UNWATCHED: ("cannot be asked: not watched", _ASK_DOCTOR),
    _ENDED: (HAS_ENDED, EARLY_END),
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

    @property
    def first(self) -> str:
        return self.lines[0]


def judge(hosts: Sequence[Host], idle_s: float) -> Verdict | None:
    """Return the verdict on a job without progress for `idle_s` seconds; None where no rank waits for another."""
    waiting, absent = _waiting_and_absent(hosts)
    if not waiting:
        return None
    blamed = absent or {rank: _reason(waiting[rank]) for rank in _different(waiting)}
    views, names = views_of(hosts), names_of(hosts)
    others = {rank: view for rank, view in waiting.items() if rank not in blamed}
    lines = [f"no progress for {idle_s:.0f} s: {_summary(blamed, names, waiting, others)}"]
    for rank, why in list(blamed.items())[:MOST_NAMED]:
        lines.append(f"{names[rank]} {_what_it_does(views.get(rank), why, bool(others))}")
        if rank in views and why not in (UNREACHABLE, UNWATCHED):
            lines += [f"    {frame}" for frame in _shown(views[rank].frames)]
    if len(blamed) > MOST_NAMED:
        lines.append(f"and {len(blamed) - MOST_NAMED} more ranks that did not come")
    for what, ranks in grouped(place, others).items():
        lines.append(f"{list_of(ranks)} wait{'s' * (len(ranks) == 1)} for {what}")
    lines.append(f"what to do: {_advice(blamed, views, others)}")
    is_sure = bool(blamed) and not any(_may_recover(views.get(rank), why) for rank, why in blamed.items())
    return Verdict(tuple(lines), tuple(blamed), is_sure)


def notice(hosts: Sequence[Host], idle_s: float, limit_s: float) -> str:
    """Return in one line which ranks wait, and what the others do; "" where it is not known whom they wait for.

    Args:
        idle_s: seconds without progress.
        limit_s: seconds without progress after which there will be a verdict.
    """
    waiting, absent = _waiting_and_absent(hosts)
    places = grouped(place, waiting)
    if not waiting or (not absent and len(places) == 1):
        return ""
    names, views = names_of(hosts), views_of(hosts)
    told = [
        f"{list_of(ranks)} {'have' if len(ranks) > 1 else 'has'} waited {idle_s:.0f} s for {what}"
        for what, ranks in list(places.items())[:_MOST_PLACES]
    ]
    for rank, why in list(absent.items())[:_MOST_PLACES]:
        told.append(f"{names[rank]} {_where_it_is(views.get(rank), why)}")
    if len(absent) > _MOST_PLACES:
        told.append(f"and {len(absent) - _MOST_PLACES} more ranks do not wait")
    return f"{'; '.join(told)}; the limit without progress is {limit_s:.0f} s"


def is_paused(hosts: Sequence[Host]) -> bool:
    """Return whether a debugger traces a rank, or the job is stopped: all its ranks, or those on rank 0's host."""

    def all_stopped(part: Sequence[Host]) -> bool:
        views = views_of(part).values()
        return bool(views) and all(view.process in (STOPPED, TRACED) for view in views)

    is_traced = any(view.process == TRACED for view in views_of(hosts).values())
    # Ctrl-Z stops the ranks of the terminal's host alone.
    return is_traced or all_stopped(hosts) or all_stopped(hosts[:1])


def _waiting_and_absent(hosts: Sequence[Host]) -> tuple[dict[int, View], dict[int, str]]:
    """Return the views of waiting ranks, and by rank the reasons of those that most likely keep them waiting."""
    waiting, absent = {}, {}
    for host in hosts:
        for rank in host.ranks:
            view = host.views.get(rank)
            if view is not None and not host.problem and view.waits and view.process not in _KNOWN:
                waiting[rank] = view
            else:
                absent[rank] = host.problem or (UNWATCHED if view is None else _reason(view))
    # If a rank has ended or is gone, the others may have failed because of it. Hosts that are not watched come last.
    for reasons in ({_ENDED}, {GONE}, {*absent.values()} - {UNWATCHED}):
        if likeliest := {rank: why for rank, why in absent.items() if why in reasons}:
            return dict(sorted(waiting.items())), likeliest
    return dict(sorted(waiting.items())), absent


def _reason(view: View) -> str:
    """Return why a rank is absent or stuck, by its view; "" if it runs."""
    return _ENDED if view.is_at_end else view.process if view.process in _KNOWN else ""


def _different(waiting: Mapping[int, View]) -> list[int]:
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
    different = []
    for views in places.values():
        groups = Counter(view.collective for view in views.values()).most_common(2)
        is_tie = len(groups) > 1 and groups[0][1] == groups[1][1]
        different += [rank for rank, view in views.items() if is_tie or view.collective != groups[0][0]]
    return sorted(different)


def _may_recover(view: View | None, why: str) -> bool:
    """Return whether a blamed rank may join the others by itself."""
    if view is None or why in (UNREACHABLE, UNWATCHED):
        return why == UNWATCHED
    return view.excuse == WORKS or view.process == UNINTERRUPTIBLE


def _shown(frames: Sequence[str]) -> list[str]:
    """Return the innermost frames, and those of the user's own files around them."""
    shown = {*frames[:_INNERMOST], *filter(is_users, frames)}
    return [frame for frame in frames if frame in shown][:_MOST_FRAMES]


def _summary(
    blamed: Mapping[int, str], names: Mapping[int, str], waiting: Mapping[int, View], others: Mapping[int, View]
) -> str:
    who = " and ".join(names[rank] for rank in list(blamed)[:MOST_NAMED])
    collectives = list(grouped(name, others))
    if not blamed:
        which = collectives[0] if len(collectives) == 1 else "others"
        what = f"all ranks wait for {which}, and none of them is missing"
    else:
        what = f"{who} did not come to {collectives[0]}" if others else f"{who} wait in different collectives"
    told = grouped(place, {rank: view for rank, view in waiting.items() if rank in blamed or not blamed})
    if len(told) < (1 if blamed and others else 2):
        return what
    places = [f"{list_of(ranks)} in {where}" for where, ranks in told.items()]
    return f"{what}: {', '.join(places[:_MOST_PLACES])}{', …' * (len(places) > _MOST_PLACES)}"


def _where_it_is(view: View | None, why: str) -> str:
    if why or view is None or view.state == State.FAILED:
        return _what_it_does(view, why, has_others=False).removesuffix(":")
    doing = "waits for its data" if view.state == State.LOADER else "is in user code"
    return f"{doing}{f' at {view.at}' * bool(view.at)}{_phase(view)}"


def _phase(view: View) -> str:
    return f" ({view.phase})" if view.phase not in TRAINING else ""


def _what_it_does(view: View | None, why: str, has_others: bool) -> str:
    if why or view is None:
        return _KNOWN[why][0]
    if view.state == State.FAILED:
        return f"has failed in {name(view)}, and has not ended:"
    if view.waits:
        return f"waits for {name(view)}{', which the others do not' if has_others else ''}"
    computes = "computes" if view.cpu > 0.5 else "does something else"
    doing = "waits for its data" if view.state == State.LOADER else computes
    return f"{doing}{_phase(view)}{':' if view.frames else ', and has not told its stack'}"


def _advice(blamed: Mapping[int, str], views: Mapping[int, View], others: Mapping[int, View]) -> str:
    if not blamed and len(grouped(place, others)) > 1:
        return same_collectives(others.values())
    if not blamed:
        return "check the network between the hosts (`trainer doctor`), and whether the ranks' shapes are the same"
    rank, why = next(iter(blamed.items()))
    if why:
        return _KNOWN[why][1]
    if views[rank].waits:
        return same_collectives(views.values())
    if views[rank].state == State.LOADER:
        return "look at the dataset and its workers; DataLoader's timeout= makes an error of a worker that hangs"
    return "look at the stack above; if it only takes long, give more time with TRAINER_HANG_TIMEOUT (seconds; 0: off)"

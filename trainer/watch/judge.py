"""From views of all ranks to a verdict: which of them keep the others waiting. No processes, no clock.

A rank that waits in no collective while others do is absent: it is the cause, whatever those that wait look like. Where
all wait, the cause is the smaller part of them that waits in another collective than the rest. Collectives of different
process groups do not compare: ranks of one may wait for those of another.
"""

from __future__ import annotations

import base64
import copy
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.cluster.processes import GONE
from trainer.watch.heartbeat import BATCH_NORM, SAVING, SIZE, TRAINING, Heartbeat, State
from trainer.watch.probe import STOPPED, TRACED, UNINTERRUPTIBLE, is_users

WORKS = "works"
"""Excuse of a rank that may be at work outside all collectives, as where rank 0 alone evaluates or saves."""
MOST_NAMED, _MOST_FRAMES, _MOST_PLACES = 8, 6, 4
_INNERMOST = 2
EARLY_END = "every rank has to take as many steps, and to call the same collectives, before it ends"
SAME_COLLECTIVES = "every rank has to call the same collectives in the same order, with tensors of the same shape"
_BATCH_NORM = (
    "sync_batch_norm makes a forward pass in training mode collective: call it on all ranks, or model.eval() before a "
    "forward pass on one rank alone"
)
UNREACHABLE, UNWATCHED = "host unreachable", "not watched"
_STATES = {
    GONE: "gone: its process has ended",
    STOPPED: "stopped (by SIGSTOP or Ctrl-Z)",
    UNINTERRUPTIBLE: "in uninterruptible sleep: a disk or a network file system does not answer",
}


class View(Heartbeat):
    """A rank, as its host's watcher sees it: its heartbeat, and what a look from outside has added.

    A look may replace what the rank itself has noted that it waits for. `group`, `number` and `steps_before` are set
    only where the flight recorder tells what that is.
    """

    process = "S"
    """The kernel's letter for its main thread."""
    cpu = 0.0
    """Share of a processor that its main thread takes."""
    frames: tuple[str, ...] = ()
    """Its main thread's stack, the innermost line first, once it was looked at."""
    at = ""
    """Where the user's own code is in that stack, such as "train.py:31"."""
    stacks = ""
    """Of all threads."""
    excuse = ""
    """Why its silence is none: it compiles, it works, or a debugger is at work."""

    def changed_since(self, other: View) -> bool:
        """Return whether it has done anything since."""
        return self.counters != other.counters

    @property
    def counters(self) -> tuple[int, ...]:
        """What grows while it goes on."""
        return (self.events, self.steps, self.updates, self.pieces, self.enqueued, self.completed)

    @property
    def waits(self) -> bool:
        return bool(self.state == State.WAITING)

    @property
    def collective(self) -> tuple[object, ...]:
        """What tells the collective that it waits in from any other one."""
        if self.group:
            return (self.what, self.group, self.number, self.elements)
        return (self.what, self.collectives, self.steps, self.elements)

    def replaced(self, **changes: Any) -> View:
        """Return a copy with some fields changed."""
        changed = copy.copy(self)
        for name, value in changes.items():
            setattr(changed, name, value)
        return changed

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON can tell it."""
        record = base64.b85encode(zlib.compress(bytes(self), 1)).decode()
        return {"heartbeat": record, **{name: getattr(self, name) for name in _SEEN}}


_SEEN = ("process", "cpu", "frames", "at", "stacks", "excuse")


def view_from(fields: Mapping[str, Any]) -> View:
    """Return the view that `as_dict` has described.

    Raises:
        ValueError, TypeError, LookupError: it is something else.
    """
    try:
        record = zlib.decompressobj().decompress(base64.b85decode(fields["heartbeat"]), SIZE)
    except zlib.error as error:
        raise ValueError(f"no heartbeat: {error}") from None
    view = View.from_buffer_copy(record)
    seen = {name: type(getattr(View, name))(fields[name]) for name in _SEEN}
    return view.replaced(**{**seen, "frames": tuple(map(str, seen["frames"]))})


@dataclass
class Host:
    """A host of the job, as the hub sees it."""

    name: str
    ranks: tuple[int, ...]
    views: dict[int, View] = field(default_factory=dict)
    heard_at: float = 0.0
    """When its watcher was heard last; 0 before."""
    is_connected: bool = False
    has_left: bool = False
    """Its watcher has said goodbye: its ranks have ended."""
    is_lost: bool = False
    """Its connection has timed out, which a watcher that ends does not do."""
    is_silent: bool = False
    """Its watcher has not answered a question, and nothing else has come from it since."""


@dataclass(frozen=True)
class Verdict:
    """What to say, and whom to blame."""

    lines: tuple[str, ...]
    culprits: tuple[int, ...]
    """Empty where all ranks wait in the same collective."""
    is_sure: bool = True
    """False where it may be a slow network, a slow disk or work on a rank: what goes on by itself."""

    @property
    def first(self) -> str:
        return self.lines[0]


def judge(hosts: Sequence[Host], idle_s: float) -> Verdict | None:
    """Return the verdict on a job in which nothing has happened for so long; None where no rank waits for another."""
    waiting, absent = _sorted(hosts)
    if not waiting:
        return None
    return _say(hosts, waiting, absent or dict.fromkeys(_different(waiting), ""), idle_s)


def notice(hosts: Sequence[Host], idle_s: float, limit_s: float) -> str:
    """Return in one line which ranks have waited for so long, and what the others do; "" where nothing tells that.

    Args:
        limit_s: after which there will be a verdict.
    """
    waiting, absent = _sorted(hosts)
    places = by_place(waiting)
    if not waiting or (not absent and len(places) == 1):
        return ""
    host_of = {rank: host.name for host in hosts for rank in host.ranks}
    views = {rank: view for host in hosts for rank, view in host.views.items()}
    told = [
        f"{list_of(ranks)} {'have' if len(ranks) > 1 else 'has'} waited {idle_s:.0f} s for {place}"
        for place, ranks in list(places.items())[:_MOST_PLACES]
    ]
    for rank, why in list(absent.items())[:_MOST_PLACES]:
        told.append(f"rank {rank} on {host_of[rank]} {_where_it_is(views.get(rank), why)}")
    if len(absent) > _MOST_PLACES:
        told.append(f"and {len(absent) - _MOST_PLACES} more ranks do not wait")
    return f"{'; '.join(told)}; the limit without progress is {limit_s:.0f} s"


def _sorted(hosts: Sequence[Host]) -> tuple[dict[int, View], Mapping[int, str]]:
    """Return the ranks that wait, and of the others those that are the surest to keep them waiting, with the reason."""
    views = {rank: host.views[rank] for host in hosts for rank in host.ranks if rank in host.views}
    missing = {rank: problem for host in hosts if (problem := _problem(host)) for rank in host.ranks}
    present = {rank: view for rank, view in sorted(views.items()) if rank not in missing}
    waiting = {rank: view for rank, view in present.items() if view.waits and view.process not in _STATES}
    seen = dict.fromkeys(present, "")
    ranks = [rank for host in hosts for rank in host.ranks]
    absent = {rank: {**missing, **seen}.get(rank, UNWATCHED) for rank in ranks if rank not in waiting}
    return waiting, _surest(absent, views)


def _different(waiting: Mapping[int, View]) -> list[int]:
    """Return the ranks that wait in another collective than most of those that they compare with; all of two halves."""
    process_groups = {view.group for view in waiting.values()}
    if len(process_groups - {""}) > 1:
        return []
    # Whoever has a larger number has been through what the others wait in: its part of that was only done earlier.
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


def _surest(absent: Mapping[int, str], views: Mapping[int, View]) -> Mapping[int, str]:
    # Others may fail because one has ended or is gone. A host that is merely not watched is blamed last.
    ended = {rank: why for rank, why in absent.items() if not why and views[rank].is_at_end}
    gone = {rank: why for rank, why in absent.items() if not why and views[rank].process == GONE}
    return ended or gone or {rank: why for rank, why in absent.items() if why != UNWATCHED} or absent


def _problem(host: Host) -> str:
    if host.is_lost or host.is_silent:
        return UNREACHABLE
    return UNWATCHED if not host.is_connected and not host.has_left else ""


def _say(hosts: Sequence[Host], waiting: Mapping[int, View], blamed: Mapping[int, str], idle_s: float) -> Verdict:
    host_of = {rank: host.name for host in hosts for rank in host.ranks}
    views = {rank: view for host in hosts for rank, view in host.views.items()}
    others = {rank: view for rank, view in waiting.items() if rank not in blamed}
    lines = []
    for rank, why in list(blamed.items())[:MOST_NAMED]:
        view = views.get(rank)
        lines.append(f"rank {rank} on {host_of[rank]} {_what_it_does(view, why, bool(others))}")
        if view is not None and not why:
            lines += [f"    {frame}" for frame in _shown(view.frames)]
    if len(blamed) > MOST_NAMED:
        lines.append(f"and {len(blamed) - MOST_NAMED} more ranks that did not come")
    lines += [
        f"{list_of(ranks)} wait{'s' * (len(ranks) == 1)} for {place}" for place, ranks in by_place(others).items()
    ]
    lines.append(f"what to do: {_advice(blamed, views, others)}")
    first = f"no progress for {idle_s:.0f} s: {_in_short(blamed, host_of, waiting)}"
    is_sure = bool(blamed) and not any(_may_go_on(views.get(rank), why) for rank, why in blamed.items())
    return Verdict((first, *lines), tuple(blamed), is_sure)


def _may_go_on(view: View | None, why: str) -> bool:
    if why or view is None:
        return why != UNREACHABLE
    return view.excuse == WORKS or view.process == UNINTERRUPTIBLE


def _shown(frames: Sequence[str]) -> list[str]:
    """Return the innermost frames, and those of the user's own files around them."""
    users = [frame for frame in frames if is_users(frame)]
    shown = dict.fromkeys((*frames[:_INNERMOST], *users))
    return [frame for frame in frames if frame in shown][:_MOST_FRAMES]


def _in_short(blamed: Mapping[int, str], host_of: Mapping[int, str], waiting: Mapping[int, View]) -> str:
    if not blamed:
        names = list(by_collective(waiting))
        what = f"all ranks wait for {names[0] if len(names) == 1 else 'others'}, and none of them is missing"
        return what if len(by_place(waiting)) == 1 else f"{what}: {_in_places(waiting)}"
    who = " and ".join(f"rank {rank} on {host_of[rank]}" for rank in list(blamed)[:MOST_NAMED])
    others = {rank: view for rank, view in waiting.items() if rank not in blamed}
    theirs = {rank: view for rank, view in waiting.items() if rank in blamed}
    if others:
        what = f"{who} did not come to {next(iter(by_collective(others)))}"
        return f"{what}: {_in_places(theirs)}" if theirs else what
    what = f"{who} wait in different collectives"
    return f"{what}: {_in_places(theirs)}" if len(by_place(theirs)) > 1 else what


def _in_places(waiting: Mapping[int, View]) -> str:
    places = [f"{list_of(ranks)} in {place}" for place, ranks in by_place(waiting).items()]
    return ", ".join(places[:_MOST_PLACES]) + (", …" if len(places) > _MOST_PLACES else "")


def _where_it_is(view: View | None, why: str) -> str:
    if why or view is None or view.process in _STATES or view.is_at_end or view.state == State.FAILED:
        return _what_it_does(view, why, has_others=False).removesuffix(":")
    doing = "waits for its data" if view.state == State.LOADER else "is in user code"
    return f"{doing}{f' at {view.at}' * bool(view.at)}{_phase(view)}"


def _phase(view: View) -> str:
    return f" ({view.phase})" if view.phase not in TRAINING else ""


def _what_it_does(view: View | None, why: str, has_others: bool) -> str:
    if why == UNREACHABLE:
        return "cannot be asked: host unreachable"
    if why or view is None:
        return f"cannot be asked: {why or UNWATCHED}"
    if view.is_at_end:
        return "has ended: its script has reached its end, or has called sys.exit"
    if view.process in _STATES:
        return f"is {_STATES[view.process]}"
    if view.state == State.FAILED:
        return f"has failed in {name(view)}, and has not ended:"
    if view.waits:
        return f"waits for {name(view)}{', which the others do not' if has_others else ''}"
    doing = (
        "waits for its data" if view.state == State.LOADER else "computes" if view.cpu > 0.5 else "does something else"
    )
    where = ":" if view.frames else ", and has not told its stack"
    return f"{doing}{_phase(view)}{where}"


def name(view: View) -> str:
    """Return what a rank waits for, as the user knows it."""
    if view.phase == SAVING:
        return f"the checkpoint ({view.what})"
    if view.phase == "evaluation" and view.what != "gradients":
        return f"the evaluation ({view.what})"
    steps = view.steps_before if view.group else view.steps
    if view.what == "gradients":
        return f"the gradients of step {steps + 1}"
    elements = f" of {view.elements:,} elements" if view.elements else ""
    start = " at the start" if steps == 0 else ""
    backend = view.group.partition(" ")[0]
    which = f"{backend}'s collective {view.number}, " if backend else ""
    if view.is_counted:
        which = f"collective {view.collectives + 1}, "
    return f"{view.what}{elements}{start} ({which}after step {steps})"


def by_place(waiting: Mapping[int, View]) -> dict[str, list[int]]:
    """Return the ranks in each collective, by its name and the line of the user's that has called it."""
    groups: dict[str, list[int]] = {}
    for rank, view in waiting.items():
        groups.setdefault(f"{name(view)}{f' at {view.at}' * bool(view.at)}", []).append(rank)
    return groups


def by_collective(waiting: Mapping[int, View]) -> dict[str, list[int]]:
    """Return the ranks in each collective, by its name."""
    groups: dict[str, list[int]] = {}
    for rank, view in waiting.items():
        groups.setdefault(name(view), []).append(rank)
    return groups


def list_of(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0, 1, 2, …"."""
    shown = ", ".join(map(str, ranks[: 2 * MOST_NAMED])) + (", …" if len(ranks) > 2 * MOST_NAMED else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _advice(blamed: Mapping[int, str], views: Mapping[int, View], others: Mapping[int, View]) -> str:
    if not blamed and len(by_place(others)) > 1:
        return same_collectives(others.values())
    if not blamed:
        return "look for what they wait on in the network between the hosts (`trainer doctor`), or for another shape"
    rank, why = next(iter(blamed.items()))
    view = views.get(rank)
    if why or view is None:
        return "look whether the host runs and can be reached (`trainer doctor`)"
    known = {
        GONE: "see why it has ended before the others",
        STOPPED: "kill -CONT lets it go on, if you have stopped it",
        UNINTERRUPTIBLE: "look at the disks and network file systems of its host (dmesg)",
    }
    if view.is_at_end:
        return EARLY_END
    if view.process in known:
        return known[view.process]
    if view.waits:
        return same_collectives(views.values())
    if view.state == State.LOADER:
        return "look at the dataset and its workers; DataLoader's timeout= makes an error of a worker that hangs"
    return "look at the stack above; if it only takes long, give more time with TRAINER_HANG_TIMEOUT (seconds; 0: off)"


def same_collectives(views: Iterable[View]) -> str:
    """Return what ranks have to do alike that have called different collectives."""
    return _BATCH_NORM if any(BATCH_NORM in (view.what, view.last) for view in views) else SAME_COLLECTIVES


def is_paused(hosts: Sequence[Host]) -> bool:
    """Return whether somebody has stopped the job: all its ranks, or those beside rank 0, as Ctrl-Z does."""

    def all_stopped(some: Sequence[Host]) -> bool:
        views = [view for host in some for view in host.views.values()]
        return bool(views) and all(view.process in (STOPPED, TRACED) for view in views)

    is_traced = any(view.process == TRACED for host in hosts for view in host.views.values())
    return is_traced or all_stopped(hosts) or all_stopped(hosts[:1])

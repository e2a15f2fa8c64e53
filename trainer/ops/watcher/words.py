"""The words of a verdict: what ranks, and the collectives that they are in, are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from trainer.ops.watcher.job import View
from trainer.watch.heartbeat import BATCH_NORM, SAVING

MOST_NAMED = 8
"""How many ranks are named one by one."""
HAS_ENDED = "has ended: its script has reached its end, or has called sys.exit"
EARLY_END = "every rank has to take as many steps, and to call the same collectives, before it ends"
_SAME_COLLECTIVES = "every rank has to call the same collectives in the same order, with tensors of the same shape"
_BATCH_NORM = (
    "sync_batch_norm makes a forward pass in training mode collective: call it on all ranks, or model.eval() before a "
    "forward pass on one rank alone"
)


def name(view: View) -> str:
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


def place(view: View) -> str:
    """Return what a rank waits for, with the line of the user's that has called it."""
    return f"{name(view)}{f' at {view.at}' * bool(view.at)}"


def grouped(label: Callable[[View], str], views: Mapping[int, View]) -> dict[str, list[int]]:
    """Return the ranks in each collective, by its `name` or `place`."""
    groups: dict[str, list[int]] = {}
    for rank, view in views.items():
        groups.setdefault(label(view), []).append(rank)
    return groups


def list_of(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0, 1, 2, …"."""
    shown = ", ".join(map(str, ranks[: 2 * MOST_NAMED])) + (", …" if len(ranks) > 2 * MOST_NAMED else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def same_collectives(views: Iterable[View]) -> str:
    """Return the advice for ranks that have called different collectives."""
    return _BATCH_NORM if any(BATCH_NORM in (view.what, view.last) for view in views) else _SAME_COLLECTIVES

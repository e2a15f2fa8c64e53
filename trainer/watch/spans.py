"""Names for torch.profiler: what the library does within a step, as `record_function` shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from torch.autograd import profiler

from trainer.watch.heartbeat import State, report_phase, writable

EXCHANGE, WAIT, LOADER, CHECKPOINT = (f"trainer: {name}" for name in ("exchange", "wait", "loader", "checkpoint"))
"""The exchange of gradients after a backward pass; within it, the wait for other ranks' gradients; the drawing of a
batch; and the part of a checkpoint that the training waits for."""
_NONE_LEFT = object()

Item = TypeVar("Item")


def in_span(name: str, function: Callable[..., Item], *arguments: object) -> Item:
    """Call a function, and show it under this name where torch's profiler runs."""
    # Without a profiler, record_function takes 6 µs, and this flag 0.06.
    if not profiler._is_profiler_enabled:
        return function(*arguments)
    with profiler.record_function(name):
        return function(*arguments)


def loading(batches: Iterable[Item], phase: str = "") -> Iterator[Item]:
    """Yield the batches, and note that this rank waits for its data while it draws one; a profiler shows it as well.

    Args:
        phase: what this rank does with each batch, for `report_phase`.
    """
    iterator = iter(batches)
    while True:
        record = writable()
        if record is not None:
            record.set(State.LOADER, b"data", 0)
        try:
            batch = in_span(LOADER, next, iterator, _NONE_LEFT)
        finally:
            if record is not None and record.state != State.FAILED:
                record.set(State.BETWEEN, b"", 0)
        if batch is _NONE_LEFT:
            return
        if phase:
            report_phase(phase)
        yield batch

"""Names for torch.profiler: what the library does within a step, as `record_function` shows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from torch.autograd import profiler

from trainer.watch.heartbeat import State, writable

EXCHANGE, WAIT, LOADER, CHECKPOINT = (f"trainer: {name}" for name in ("exchange", "wait", "loader", "checkpoint"))
"""The exchange of gradients after a backward pass; within it, the wait for other ranks' gradients; the drawing of a
batch; and the part of a checkpoint that the training waits for."""
_NO_SPAN = nullcontext()
_NONE_LEFT = object()

Item = TypeVar("Item")


def span(name: str) -> AbstractContextManager[object]:
    """Return a context that shows under this name where torch's profiler runs, and does nothing elsewhere."""
    # Without a profiler, record_function takes 6 µs, and this flag 0.06.
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NO_SPAN


def loading(batches: Iterable[Item]) -> Iterator[Item]:
    """Yield the batches, and note that this rank waits for its data while it draws one; a profiler shows it as well."""
    iterator = iter(batches)
    while True:
        record = writable()
        if record is not None:
            record.set(State.LOADER, b"data", 0)
        try:
            with span(LOADER):
                batch = next(iterator, _NONE_LEFT)
        finally:
            if record is not None and record.state != State.FAILED:
                record.set(State.BETWEEN, b"", 0)
        if batch is _NONE_LEFT:
            return
        yield batch  # type: ignore[misc]  # the sentinel has gone

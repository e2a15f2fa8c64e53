"""How the function ended on each rank, what its caller gets to know, and the pickles that are sent both ways."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType
from typing import Any, BinaryIO

import cloudpickle

from trainer.errors import LaunchError

CALL = "call"
"""File with the function and its arguments, in the folder of a launch."""


@dataclass(frozen=True)
class Outcome:
    """How the function ended on a rank, as that rank has written it."""

    rank: int
    size: int
    host: str
    attempt: str
    """Identifies the start of the job; each start has a different text."""
    time: float
    """When it was written, in seconds by the host's clock."""
    value: bytes
    """The result, or the exception, as a pickle; empty for an exception that cannot be pickled."""
    trace: str = ""
    """The traceback of the exception; empty where the function has returned."""
    follows: bool = False
    """Whether the exception is only a consequence of the loss of another rank."""

    @property
    def place(self) -> str:
        return f"rank {self.rank} of {self.size} on host {self.host}"


class RankTracebackError(Exception):
    """The traceback of a rank's exception, shown as the exception's cause."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def _made_again(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    """Return an exception without a call of its class's own `__init__`, which may take other arguments."""
    error = kind.__new__(kind, *args)
    builtin: Any = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    builtin.__init__(error, *args)
    vars(error).update(attributes)
    return error


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Sends GPU tensors as CPU tensors, as the receiver may see other GPUs, or none; and exceptions of every class."""

    def reducer_override(self, obj: Any) -> Any:
        kind, torch = type(obj), sys.modules.get("torch")
        has_own = [isinstance(method, FunctionType) for method in (kind.__init__, kind.__reduce__)]
        if isinstance(obj, BaseException) and has_own == [True, False]:
            return _made_again, (kind, obj.__reduce__()[1], vars(obj))
        if torch is not None and kind is torch.Tensor and obj.device.type not in ("cpu", "meta"):
            return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(2)
        return super().reducer_override(obj)


def dumps(value: Any) -> bytes:
    """Return a value as a pickle, also of what a notebook's cells define; raises whatever its parts raise."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def read_outcomes(file: BinaryIO) -> Iterator[Outcome]:
    """Yield the outcomes that a file holds one after another, up to the first that is cut off."""
    with suppress(EOFError, pickle.UnpicklingError):
        while True:
            yield pickle.load(file)  # noqa: S301 (written by this user's own ranks, and brought by ssh)


def conclude(code: int, text: str, outcomes: Iterable[Outcome]) -> list[Any]:
    """Return what the ranks have returned, in their order.

    Args:
        code: exit code of the job.
        text: how its last attempt ended.
        outcomes: those of all ranks.

    Raises:
        Exception: the exception of the rank that failed first, with its traceback as the cause.
        LaunchError: the job failed without an exception of the function, or with one that cannot be sent.
    """
    by_time = sorted(outcomes, key=lambda outcome: outcome.time)
    # An earlier attempt may have left outcomes, even of ranks that the last attempt did not have.
    last = {outcome.rank: outcome for outcome in by_time if outcome.attempt == by_time[-1].attempt}
    if code == 0:
        return [_value(last, rank) for rank in range(next(iter(last.values())).size if last else 1)]
    failed = [outcome for outcome in last.values() if outcome.trace and not outcome.follows]
    if failed:
        _raise(min(failed, key=lambda outcome: outcome.time))
    raise LaunchError(text)


def _value(outcomes: dict[int, Outcome], rank: int) -> Any:
    if rank not in outcomes or outcomes[rank].trace:
        raise LaunchError(f"rank {rank} has ended without a result, as when the function calls os._exit")
    return pickle.loads(outcomes[rank].value)  # noqa: S301 (as above)


def _raise(failed: Outcome) -> None:
    """Raise the exception of a rank."""
    error: BaseException | None = None
    with suppress(Exception):  # a class that cannot be imported here, or that cannot be made from its arguments
        error = pickle.loads(failed.value) if failed.value else None  # noqa: S301 (as above)
    if error is None:
        error = LaunchError(f"{failed.place}: {failed.trace.rstrip().rpartition(chr(10))[2]}")
    error.add_note(f"raised by {failed.place}")
    raise error from RankTracebackError(failed.trace)

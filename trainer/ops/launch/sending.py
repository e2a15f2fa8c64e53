"""Pickles of what goes to the ranks and comes back, by cloudpickle, which also takes what a notebook's cells define."""

from __future__ import annotations

import inspect
import io
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any, BinaryIO

import cloudpickle

_DEEPEST = 8
"""How deep to search a value for the part that cannot be sent; for a deeper part, the value that holds it is named."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Sends GPU tensors as CPU tensors, because the process that gets them may see other GPUs, or none."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor and obj.device.type not in ("cpu", "meta"):
            return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(2)
        return super().reducer_override(obj)


def dump(value: Any, file: BinaryIO) -> None:
    """Write a value as a pickle; raises whatever the pickling of its parts raises."""
    _Pickler(file).dump(value)


def dumps(value: Any) -> bytes:
    """Return a value as a pickle; raises whatever the pickling of its parts raises."""
    buffer = io.BytesIO()
    dump(value, buffer)
    return buffer.getvalue()


def describe_unsendable(values: Mapping[str, Any]) -> str:
    """Return which part of these values cannot be sent, and why; empty where all can.

    Args:
        values: the values by their names, as in "argument 'config'".
    """
    for name, value in values.items():
        if problem := _problem_of(value):
            return _describe(value, name, problem, _DEEPEST)
    return ""


def _problem_of(value: Any) -> str:
    try:
        dumps(value)
    except Exception as error:  # whatever the value's own code raises
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""


def _describe(value: Any, name: str, problem: str, depth: int) -> str:
    for part_name, part in _parts_of(value) if depth else ():
        if part is not value and (inner := _problem_of(part)):
            return _describe(part, f"{name}, {part_name}", inner, depth - 1)
    kind = type(value)
    return f"{name} ({kind.__module__}.{kind.__qualname__}): {problem}"


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the parts that are sent with a value."""
    if isinstance(value, Mapping):
        yield from ((f"item {key!r}", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"item {number}", part) for number, part in enumerate(value))
    elif isinstance(value, FunctionType):
        variables = inspect.getclosurevars(value)
        yield from ((f"variable {name!r}", part) for name, part in {**variables.nonlocals, **variables.globals}.items())
        yield "the defaults of its parameters", (value.__defaults__, value.__kwdefaults__)
    elif isinstance(value, partial):
        yield from (("its function", value.func), ("its arguments", value.args), ("its arguments", value.keywords))
    elif isinstance(value, MethodType):
        yield "its object", value.__self__
    else:
        yield from ((f"attribute {name!r}", part) for name, part in getattr(value, "__dict__", {}).items())

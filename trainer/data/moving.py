"""Moves batches of any kind to a rank's device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def move(value: Any, device: torch.device) -> Any:
    """Return `value` with every tensor in it (in tuples, lists and dicts, and objects with `.to`) on `device`."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping) and not hasattr(value, "to"):  # a tokenizer's batch is a mapping, and has `.to`
        return type(value)({key: move(item, device) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move(item, device) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(move(item, device) for item in value)
    return value.to(device) if hasattr(value, "to") else value

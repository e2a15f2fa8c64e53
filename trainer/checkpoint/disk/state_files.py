"""State files: one for what every rank has, and one for each rank's part of the sharded tensors.

`state.pt` holds the whole state. Where ranks write their parts themselves, it has a tensor without values ("meta") in
place of each sharded one, and each `part-00001.pt` the values of one rank, by the tensor's path in the state.
PyTorch's distributed checkpoints (DCP) keep a pickle beside their parts, which can run code when it is read; all of
these files are loaded with `weights_only=True`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.errors import DataError, TrainerError
from trainer.models.sharded import Part, Scattered, TensorPath

STATE = "state.pt"

SavedParts = Mapping[TensorPath, Mapping[str, Any]]
"""One rank's parts of sharded tensors: the `offset` and the `values` of each, by the tensor's path."""


def part_name(rank: int) -> str:
    """Return the name of the file in which a rank writes its part."""
    return f"part-{rank:05d}.pt"


def read_state(path: Path, *, is_mapped: bool = False) -> dict[str, Any]:
    """Return the state of a checkpoint, on the CPU.

    Args:
        is_mapped: give each tensor as a `Scattered` that reads from the files when it is asked to, so that a rank which
            needs parts of them only has no more in its memory. What is in several files is a `Scattered` in any case.

    Raises:
        TrainerError: it cannot be loaded, as where a part of a tensor is missing.
    """
    files = sorted(path.glob("part-*.pt"))
    is_mapped = is_mapped or bool(files)
    try:
        state: dict[str, Any] = _load(path / STATE, is_mapped=is_mapped)
        if is_mapped:
            state = _scatter(state, (), [_load(file, is_mapped=True) for file in files])
    except Exception as error:
        raise TrainerError(f"checkpoint {path} cannot be loaded as data ({error})") from None
    return state


def _load(file: Path, *, is_mapped: bool) -> Any:
    return torch.load(file, weights_only=True, map_location="cpu", mmap=is_mapped)


def _scatter(value: Any, path: TensorPath, parts: Sequence[SavedParts]) -> Any:
    if isinstance(value, Tensor):
        return _scatter_tensor(value, path, parts)
    if isinstance(value, dict):
        for key, inner in value.items():  # in place: a module's state has an attribute of its own
            value[key] = _scatter(inner, (*path, key), parts)
        return value
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)(_scatter(inner, (*path, number), parts) for number, inner in enumerate(value))
    return value


def _scatter_tensor(value: Tensor, path: TensorPath, parts: Sequence[SavedParts]) -> Tensor | Scattered:
    if value.layout is not torch.strided:
        return value.clone()
    if not value.is_meta:
        return Scattered(value.shape, value.dtype, [Part((0,) * value.dim(), value)])
    pieces = [Part(tuple(part[path]["offset"]), part[path]["values"]) for part in parts if path in part]
    if (count := sum(piece.values.numel() for piece in pieces)) != value.numel():
        name = ".".join(map(str, path))
        raise DataError(f"{count:,} of the {value.numel():,} values of {name} are in its files")
    return Scattered(value.shape, value.dtype, pieces)

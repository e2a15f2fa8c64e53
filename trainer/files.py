"""Result files: written whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from trainer.errors import ConfigError, TrainerError


def write_atomically(path: Path, text: str) -> None:
    """Write beside `path` and rename, so that neither a reader nor a crash ever leaves half a file."""
    _write_beside(path, lambda file: file.write(text.encode()))


def save_atomically(path: Path, value: Any) -> None:
    """Have `torch.save` write beside `path`, in folders that are made where they are not there, and rename.

    A model's state goes into a file whose name ends in `.safetensors` in that format, which transformers, vLLM and
    others read.

    Raises:
        TrainerError: it cannot be written; what was there stays.
        ConfigError: `.safetensors` is given for something else, or the package safetensors is not installed.
    """
    import torch  # here, because commands that need no PyTorch import this module

    is_for_others = path.suffix == ".safetensors"
    write = _safetensors_of(path, value) if is_for_others else lambda file: torch.save(value, file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_beside(path, write)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise TrainerError(f"{path} cannot be written: {reason}") from None


def _safetensors_of(path: Path, state: Any) -> Callable[[BinaryIO], object]:
    """Return what writes a model's state into an open file."""
    import torch

    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ConfigError(f"{path} is for the state of a model, whose values are all tensors; name another file for it")
    try:
        from safetensors.torch import save
    except ImportError:
        raise ConfigError(f"{path} needs the package safetensors; install it, or name a file for torch.save") from None
    tensors: dict[str, torch.Tensor] = {}
    memory: set[int] = set()
    for name, value in state.items():
        tensor = value.detach().cpu().contiguous()
        address = tensor.untyped_storage().data_ptr()
        # The format has no names for one memory, as tied weights have it: readers find each name.
        tensors[name] = tensor.clone() if address in memory else tensor
        memory.add(address)
    return lambda file: file.write(save(tensors, {"format": "pt"}))


def _write_beside(path: Path, write: Callable[[BinaryIO], object]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        # What an interrupted call has left, or a link to a file that whoever else can write the folder wants written.
        partial.unlink(missing_ok=True)
        with partial.open("xb") as file:
            write(file)
        partial.replace(path)
    except (OSError, RuntimeError):  # the latter is how `torch.save` tells of a file that cannot be written
        with suppress(OSError):
            partial.unlink()
        raise

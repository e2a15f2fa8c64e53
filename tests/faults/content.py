"""The checkpoints that the trials save: each is known by its number."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch

from trainer.checkpoint.disk.commit import commit
from trainer.checkpoint.disk.committed import Committed, name_of

_WEIGHTS = 300_000  # larger than the writer's buffer, so PyTorch itself meets the errors of writing


def _content(number: int) -> tuple[dict[str, torch.Tensor], bytes]:
    weights = torch.arange(_WEIGHTS, dtype=torch.float32) + number
    return {"weights": weights}, json.dumps({"samples": 1000 * number}).encode()


def checkpoint_name(number: int) -> str:
    return name_of(1, number, 100 * number)


def save(folder: Path, number: int) -> Committed:
    state, position = _content(number)
    files: dict[str, Callable[[BinaryIO], object]] = {
        "weights.pt": partial(torch.save, state),
        "loader.json": lambda file: file.write(position),
    }
    return commit(folder, checkpoint_name(number), files, {"number": number})


def is_saved(checkpoint: Committed, number: int) -> bool:
    state, position = _content(number)
    read = torch.load(checkpoint.path / "weights.pt", weights_only=True, mmap=True)
    is_state = read.keys() == state.keys() and all(torch.equal(read[name], state[name]) for name in state)
    is_facts = checkpoint.facts == {"number": number} and checkpoint.order == (1, number, 100 * number)
    return is_state and is_facts and (checkpoint.path / "loader.json").read_bytes() == position

"""The states of random number generators, and how ranks come to draw different numbers."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.cluster.output import print_line
from trainer.data.shard_plan import mix_seeds
from trainer.strategies.base import Strategy

_SEED: Mapping[str, Callable[[int], object]] = {
    "python": random.seed,
    "numpy": lambda seed: np.random.seed(seed % 2**32),
    "torch": torch.default_generator.manual_seed,
    "cuda": torch.cuda.manual_seed,
}


def draw_apart(strategy: Strategy, seed: int) -> None:
    """Seed ranks differently whose random number generators are in the same state. Collective.

    Scripts seed all ranks alike to get the same weights; without this, dropout, noise and samples that are drawn
    afterwards would be the same on all ranks as well. The first rank with a state keeps it, so that a single process
    draws what it draws without this library. The others are seeded with `seed`, that state and their rank. The
    generators of Python, NumPy, PyTorch and a GPU are each compared and seeded separately.
    """
    world = strategy.world
    if world.size == 1:
        return
    by_rank = strategy.all_gather_object(_digests(world.device))
    for name, state in by_rank[world.rank].items():
        if any(other.get(name) == state for other in by_rank[: world.rank]):
            _SEED[name](mix_seeds(seed, int(state[:15], 16), world.rank))


def warn_of_twins(strategy: Strategy, batch: object) -> bool:
    """Warn on rank 0 if ranks draw the same random numbers, or train on the same batch; return if so. Collective.

    Args:
        batch: what tells this rank's batch; None if nothing does.
    """
    by_rank = strategy.all_gather_object((_digests(strategy.world.device)["torch"], batch))
    for values, what_they_do in zip(zip(*by_rank, strict=True), _TWINS, strict=True):
        for rank, value in enumerate(values):
            if value is not None and value in values[:rank]:
                if strategy.world.is_root:
                    print_line(f"trainer: WARNING: ranks {values.index(value)} and {rank} {what_they_do}", sys.stderr)
                return True
    return False


_TWINS = (
    "draw the same random numbers, for dropout and noise as well; call torch.manual_seed before run.prepare, which has "
    "each rank go on with its own, or add run.rank to each seed",
    "have trained on the same batch, so that two ranks do the work of one; take run.loader, or give each rank other "
    "samples",
)


def _digests(device: torch.device) -> dict[str, str]:
    """Return a hash of each generator's state. It seeds ranks, so another hash would change what they draw."""
    state = random_state(device)
    _, keys, position, *_ = state["numpy"]
    state["python"] = repr(state["python"]).encode()
    state["numpy"] = repr((keys.numpy().astype(np.uint32).tobytes(), position)).encode()
    return {
        name: hashlib.sha256(value.numpy().tobytes() if isinstance(value, Tensor) else value).hexdigest()
        for name, value in state.items()
    }


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, NumPy's and PyTorch's generators, those of `device` included, as plain data."""
    name, keys, *rest = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the states that `random_state` returned; the GPU's only if there is one."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)

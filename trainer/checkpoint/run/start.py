"""Start: which checkpoint a run goes on from, and what it takes over from it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.disk.committed import Committed, find, order_of
from trainer.checkpoint.disk.state_files import read_state
from trainer.checkpoint.run.contents import Contents
from trainer.checkpoint.run.storage import Storage
from trainer.cluster.output import print_line
from trainer.config import CheckpointConfig
from trainer.data.shard_plan import mix_seeds
from trainer.errors import ConfigError, TrainerError
from trainer.models.sharded import shard_as
from trainer.strategies.base import Strategy


@dataclass
class Resumed:
    """Where an interrupted run stopped."""

    checkpoint: Committed
    epoch: int
    """Number of the epoch in which it goes on, from 0."""
    updates: int
    positions: Sequence[Mapping[str, Any]]
    """Of the loaders, in the order in which they were made."""
    saved_in: int | None
    """The loader in whose pass it was saved; None between two epochs."""
    random: Mapping[str, Any] | None
    """Of this rank; None once they are in use."""
    best: tuple[float, str] | None

    @property
    def is_complete(self) -> bool:
        """Whether the training had reached its end."""
        return bool(self.checkpoint.facts["complete"])


def find_start(
    storage: Storage, config: CheckpointConfig, strategy: Strategy, contents: Contents
) -> tuple[Resumed | None, int]:
    """Load what the run goes on from, if anything; return that, and the number of this start. Collective.

    Raises:
        ConfigError: the checkpoint does not fit the run, the one that was named is damaged or not there, or the folder
            is not empty and the run is to start anew.
        TrainerError: the checkpoint cannot be loaded.
    """
    orders = [order_of(path.name) for path in find(storage.folder)] if storage.is_writer else []
    attempts = strategy.all_gather_object(max((order[0] for order in orders if order), default=0))
    if config.resume == "none":
        if any(attempts):
            raise ConfigError(
                f"the folder {config.folder} holds checkpoints, and resume is 'none'; valid is 'auto', which goes on "
                "from the newest, or another folder"
            )
        return None, 1
    checkpoint = storage.newest()
    # One that is named is where the first start begins; a later start of the same command goes on.
    if config.resume != "auto" and (checkpoint is None or checkpoint.facts["resume"] != str(config.resume)):
        checkpoint = storage.at(Path(config.resume))
    attempt = max([*attempts, checkpoint.order[0] if checkpoint else 0]) + 1
    resumed = _load(checkpoint, strategy, contents) if checkpoint else None
    storage.discard_copy()
    return resumed, attempt


def _load(checkpoint: Committed, strategy: Strategy, contents: Contents) -> Resumed:
    try:
        state = read_state(checkpoint.path, is_mapped=strategy.shards)
    except Exception as error:
        raise TrainerError(f"checkpoint {checkpoint.path} cannot be loaded as data ({error})") from None
    if problems := contents.differences(state):
        raise ConfigError(
            f"checkpoint {checkpoint.path.name} does not fit this run: {'; '.join(problems)}; give another folder, or "
            "restore what it was made with"
        )
    differences = contents.load(state)
    state = shard_as({name: value for name, value in state.items() if name not in contents.KEYS}, None)
    world, states = strategy.world, state["random"]
    resumed = Resumed(
        checkpoint=checkpoint,
        epoch=state["epoch"],
        updates=state["updates"],
        positions=state["loaders"],
        saved_in=state["saved_in"],
        random=states[world.rank] if len(states) == world.size else None,
        best=tuple(best) if (best := checkpoint.facts["best"]) else None,
    )
    if resumed.random is None:  # each number of ranks draws other numbers
        torch.manual_seed(mix_seeds(resumed.updates, world.rank))
    if world.is_root:
        print_line(f"trainer: {_describe(resumed, len(states))}", sys.stderr)
        if differences:
            print_line(f"trainer: WARNING: the script differs from the checkpoint; {differences}", sys.stderr)
    return resumed


def _describe(resumed: Resumed, ranks: int) -> str:
    facts = resumed.checkpoint.facts
    position = resumed.positions[resumed.saved_in] if resumed.saved_in is not None else {"taken": 0}
    where = f"the end of epoch {resumed.epoch}"
    if taken := position["taken"]:
        where = f"epoch {resumed.epoch + 1} after {taken:,} {position.get('unit', 'samples')}"
    if resumed.is_complete:
        where += " and of the training"
    return (
        f"going on from checkpoint {resumed.checkpoint.path.name}, {where}, written {facts['written']} by {ranks} "
        f"rank{'s' * (ranks > 1)}"
    )

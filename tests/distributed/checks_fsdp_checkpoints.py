"""Checkpoints in which each rank writes its part of a sharded training; run on every rank of one job."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.checks_checkpoints import shared_folder
from tests.distributed.checks_every_strategy import BATCH
from tests.distributed.checks_fsdp import adamw, loss_of, make_text, make_transformer
from tests.distributed.checks_storage import each_rank_a_host
from trainer import Checkpoints, FsdpConfig, TrainerError, init
from trainer.checkpoint.disk import durable
from trainer.checkpoint.disk.committed import find, load
from trainer.models.sharded import gather
from trainer.ops.merge import merge
from trainer.strategies.base import Strategy


class Training:
    """A transformer that is trained and saved after each epoch of three updates.

    Args:
        over: ranks that share one copy of the model.
        options: of the checkpoints.
    """

    def __init__(
        self, strategy: Strategy, folder: Path, over: str | int = "all", seed: int = 1, **options: Any
    ) -> None:
        self.run = init(strategy, fsdp=FsdpConfig(shard_over=over))
        self.model = make_transformer(seed=seed)
        self.forward, self.optimizer = self.run.prepare(self.model, adamw(self.model.parameters()))
        size = BATCH * strategy.world.size
        self.loader = self.run.loader(make_text(3 * size), global_batch_size=size)
        self.checkpoints: Checkpoints = self.run.checkpoints(folder, every_epochs=1, **options)

    def train(self, epochs: int, after: Callable[[int], object] = lambda _: None) -> dict[str, Tensor]:
        for epoch in self.run.epochs(epochs):
            for inputs, targets in self.loader:
                self.optimizer.zero_grad()
                self.run.backward(loss_of(self.forward, inputs, targets))
                self.optimizer.step()
            after(epoch)
        self.checkpoints.close()
        self.run.strategy.barrier()
        return whole(self.model)


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: gather(value) for name, value in model.state_dict().items()}


def files_of(folder: Path) -> dict[str, int]:
    (newest, *_) = find(folder)
    return {name: entry.size for name, entry in load(newest).files.items()}


def assert_equal(actual: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(actual) == list(other)
    for name, value in actual.items():
        torch.testing.assert_close(value, other[name], rtol=1e-11, atol=1e-12)


def check_each_rank_writes_its_part_and_keeps_no_more_in_memory(strategy: Strategy) -> None:
    ranks = strategy.world.size
    with shared_folder(strategy) as folder:
        training = Training(strategy, folder)
        training.train(1)
        files = files_of(folder)
        assert sorted(files) == [*(f"part-{rank:05d}.pt" for rank in range(ranks)), "state.pt"]
        numbers = sum(parameter.numel() for parameter in make_transformer().parameters())
        row = sum(parameter[:1].numel() for parameter in make_transformer().parameters())
        each = 3 * 8 * (numbers / ranks + row)  # in float64, the weights and AdamW's two moments
        headers = 2000 * 3 * len(list(training.model.parameters()))
        assert max(size for name, size in files.items() if name != "state.pt") < each + headers
        assert files["state.pt"] < headers + 100_000  # the random states of all ranks
        held = sum(buffer.nbytes for buffer in training.checkpoints._storage._snapshot._buffers.values())
        assert held < each + 10_000


def check_parts_go_on_where_ranks_share_copies_otherwise(strategy: Strategy) -> None:
    """With every number of copies that the ranks allow; of several copies one is written."""
    ranks = strategy.world.size
    with shared_folder(strategy) as folder:
        expected = Training(strategy, folder / "whole").train(3)
        for over in {1, ranks, 2 if ranks % 2 == 0 else ranks}:
            for epochs, shard_over in ((1, over), (2, "all"), (3, over)):
                training = Training(strategy, folder / str(over), shard_over, seed=epochs)
                assert (training.checkpoints.resumed is None) == (epochs == 1)
                weights = training.train(epochs)
                size = sum(files_of(folder / str(over)).values())
                assert size < 1.2 * sum(files_of(folder / "whole").values())
            assert_equal(weights, expected)


def check_one_file_is_as_good_as_the_parts(strategy: Strategy) -> None:
    """Where each host has a folder of its own, each has all of it; `trainer merge` makes such a file of the parts."""
    with shared_folder(strategy) as folder, pytest.MonkeyPatch.context() as patch:
        expected = Training(strategy, folder / "parts").train(1)
        (own := folder / f"host-{strategy.world.rank}").mkdir()
        with each_rank_a_host(strategy):
            patch.chdir(own)
            weights = Training(strategy, Path("one")).train(1)
            assert list(files_of(own / "one")) == ["state.pt"]
            assert_equal(weights, expected)
            again = Training(strategy, Path("one")).train(2)
        if strategy.world.is_root:
            merge(folder / "parts", folder / "merged.pt")
        strategy.barrier()
        states = [
            torch.load(file, weights_only=True) for file in (folder / "merged.pt", find(own / "one")[1] / "state.pt")
        ]
        for state in states:
            assert_equal(state["models"][0], expected)
            plain = make_transformer(seed=9)
            plain.load_state_dict(state["models"][0])
        moments = [state["optimizers"][0]["state"] for state in states]
        torch.testing.assert_close(moments[0], moments[1])
        assert_equal(again, Training(strategy, folder / "parts").train(2))


def check_a_rank_that_cannot_write_its_part_is_named_and_costs_one_checkpoint(strategy: Strategy) -> None:
    """Its own reason is told, on every rank. What was written is gone, and the next one is committed."""
    last = strategy.world.size - 1
    with shared_folder(strategy) as folder, pytest.MonkeyPatch.context() as patch:
        training = Training(strategy, folder, on_error="stop")
        if strategy.world.rank == last:
            patch.setattr(durable._HashingFile, "write", _disk_is_full)
        with pytest.raises(TrainerError, match=rf"part-{last:05d}\.pt\.partial: No space left on device"):
            training.train(1)
        strategy.barrier()
        left = [path.name for path in folder.iterdir()]
        strategy.barrier()
        assert left == [".lock"]
        patch.undo()
        training.checkpoints.save()
        training.checkpoints.close()
        assert len(files_of(folder)) == 1 + strategy.world.size


def _disk_is_full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

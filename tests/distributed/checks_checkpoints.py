"""A run that was interrupted ends with the weights of one that was not; run on every rank of one job."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer import Checkpoints, ConfigError, InMemory, TrainerError, init
from trainer.checkpoint.disk.committed import find
from trainer.strategies.base import Strategy

EPOCHS, SAMPLES = 3, 41


class Interrupted(Exception):  # noqa: N818 (it is no error)
    """What ends a loop here, as a killed process would."""


def _interrupt() -> None:
    raise Interrupted


@contextmanager
def shared_folder(strategy: Strategy) -> Iterator[Path]:
    """Give all ranks one new folder, and remove it when all of them are done."""
    folder = Path(strategy.broadcast_object(tempfile.mkdtemp() if strategy.world.is_root else None))
    yield folder / "checkpoints"
    strategy.barrier()
    if strategy.world.is_root:
        shutil.rmtree(folder)


class Training:
    """A model with dropout and BatchNorm, AdamW, a scheduler, clipping and accumulation: all that has a state.

    Args:
        depends_on_ranks: with dropout and BatchNorm, whose results differ with the number of ranks.
    """

    def __init__(self, strategy: str | Strategy, *, depends_on_ranks: bool = True) -> None:
        self.run = init(strategy, accumulate=2)
        torch.manual_seed(1)
        between = (nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3)) if depends_on_ranks else (nn.Tanh(),)
        # A bias before BatchNorm has no gradient but rounding errors, of which AdamW makes whole steps.
        self.model = nn.Sequential(nn.Linear(6, 8, bias=False), *between, nn.Linear(8, 3)).double()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.forward, self.optimizer = self.run.prepare(self.model, optimizer)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=4, gamma=0.5)
        generator = torch.Generator().manual_seed(2)
        inputs = torch.randn(SAMPLES, 6, generator=generator).double()
        data = InMemory(inputs, torch.randint(3, (SAMPLES,), generator=generator))
        self.loader = self.run.loader(data, global_batch_size=9)
        self.totals = {"updates": 0}
        torch.manual_seed(3 + self.run.rank)

    def checkpoints(self, folder: Path, **options: Any) -> Checkpoints:
        state = {"schedule": self.schedule, "totals": self.totals}
        return self.run.checkpoints(folder, state=state, **options)

    def train(self, stop_after: int = -1, stop: Callable[[], object] = _interrupt) -> list[Tensor]:
        """Train to the end and return the weights; after so many updates in all, call `stop`."""
        for _ in self.run.epochs(EPOCHS):
            for inputs, targets in self.loader:
                self.run.backward(F.cross_entropy(self.forward(inputs), targets))
                if self.run.sync_gradients:
                    self.run.clip_grad_norm_(self.model, 0.5)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    self.schedule.step()
                    self.totals["updates"] += 1
                    if self.totals["updates"] == stop_after:
                        stop()
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def assert_equal(strategy: Strategy, actual: list[Tensor], expected: list[Tensor]) -> None:
    # The sum of three floats depends on its order, and that on buckets and on which rank comes first.
    exact = strategy.world.size <= 2
    for weight, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(weight, other, rtol=0 if exact else 1e-12, atol=0 if exact else 1e-13)


def interrupt(strategy: Strategy, folder: Path, stop_after: int, **options: Any) -> None:
    """Train until so many updates, and leave what a killed job leaves."""
    training = Training(strategy)
    checkpoints = training.checkpoints(folder, **options)
    with pytest.raises(Interrupted):
        training.train(stop_after)
    checkpoints.close()
    strategy.barrier()


def check_an_interrupted_run_ends_with_the_weights_of_an_uninterrupted_one(strategy: Strategy) -> None:
    expected = Training(strategy).train()
    with shared_folder(strategy) as folder:
        # Within the first epoch, again within it, after its end, and within the last one.
        for stop_after in (2, 3, 5, 8):
            interrupt(strategy, folder, stop_after, every_updates=1, keep=2)
        training = Training(strategy)
        checkpoints = training.checkpoints(folder, every_updates=1, keep=2)
        assert checkpoints.resumed is not None
        assert checkpoints.updates == training.totals["updates"] == 7  # the eighth's batch was still in use
        assert_equal(strategy, training.train(), expected)
        assert training.totals["updates"] == 9
        checkpoints.close()
        strategy.barrier()
        assert len(find(folder)) == 2
        # The same again finds that all is done.
        training = Training(strategy)
        checkpoints = training.checkpoints(folder)
        assert checkpoints.resumed is not None
        assert_equal(strategy, training.train(), expected)
        assert training.totals["updates"] == 9
        checkpoints.close()


def check_a_signal_to_one_rank_stops_all_after_the_same_update(strategy: Strategy) -> None:
    expected = Training(strategy).train()
    for number in (signal.SIGTERM, signal.SIGUSR2):
        with shared_folder(strategy) as folder:
            training = Training(strategy)
            checkpoints = training.checkpoints(folder)
            is_last = strategy.world.rank == strategy.world.size - 1
            with pytest.raises(SystemExit) as end:
                training.train(2, partial(os.kill, os.getpid(), number) if is_last else time.time)
            assert end.value.code == 75
            checkpoints.close()
            stopped = strategy.all_gather_object(training.totals["updates"])
            assert 2 <= stopped[0] <= 9
            assert stopped == [stopped[0]] * strategy.world.size
            training = Training(strategy)
            checkpoints = training.checkpoints(folder)
            assert training.totals["updates"] == stopped[0]
            assert_equal(strategy, training.train(), expected)
            checkpoints.close()


def check_what_does_not_fit_is_told_on_every_rank(strategy: Strategy) -> None:
    with shared_folder(strategy) as folder:
        interrupt(strategy, folder, 3, every_updates=1)
        run = init(strategy)
        model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9)).double()
        _, _optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(
            ConfigError, match=r"0\.weight has shape \(8, 6\) there and \(9, 6\) here.*is a AdamW there"
        ):
            run.checkpoints(folder)
        strategy.barrier()
        # Nothing was changed.
        assert all(torch.equal(weight, other) for weight, other in zip(model.parameters(), before, strict=True))


def check_a_damaged_checkpoint_is_passed_over(strategy: Strategy) -> None:
    with shared_folder(strategy) as folder:
        interrupt(strategy, folder, 3, every_updates=1)
        strategy.barrier()
        newest, older = find(folder)
        if strategy.world.is_root:
            content = bytearray((newest / "state.pt").read_bytes())
            content[len(content) // 2] ^= 1
            (newest / "state.pt").write_bytes(content)
        strategy.barrier()
        training = Training(strategy)
        checkpoints = training.checkpoints(folder, keep=9)
        assert checkpoints.resumed is not None
        assert (checkpoints.resumed.checkpoint.path, checkpoints.updates) == (older, 1)
        checkpoints.save()
        training.train(2, checkpoints.save)
        checkpoints.close()
        strategy.barrier()
        assert newest not in find(folder)
        assert older in find(folder)


def check_no_checkpoint_is_made_of_ranks_that_differ(strategy: Strategy) -> None:
    """A bit flips in what the last rank's optimizer keeps: its weights differ after the next update only."""
    last = strategy.world.size - 1
    if last == 0 or strategy.shards:
        return
    with shared_folder(strategy) as folder:
        training = Training(strategy)
        checkpoints = training.checkpoints(folder, every_updates=1)

        def flip() -> None:
            if strategy.world.rank == last:
                kept = training.optimizer.state[next(training.model.parameters())]["exp_avg"]
                kept.view(torch.int64)[1, 2] ^= 1 << 40

        said = (
            rf"weights of rank {last} on host .* first in exp_avg .*, after update 3 \(.* agreed: that of update 2\):"
        )
        with pytest.raises(TrainerError, match=said):
            training.train(3, flip)
        checkpoints.close()
        strategy.barrier()
        assert find(folder)[0].name == "attempt-0001-epoch-0000-update-00000002"

"""Local training under a compression: what ranks that are threads send of a round's changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.unit.ranks_as_threads import Threads
from tests.unit.test_local_sgd import rounds
from trainer.strategies.base import Strategy
from trainer.strategies.compress.local_sgd import LocalSynchronizer

RANKS, EVERY = 3, 2
SHAPES = [(64, 48), (48,), ()]


class Changed:
    """A rank's model, each step of which adds what the rank alone has drawn."""

    def __init__(self, rank: int, strategy: Strategy, compression: str) -> None:
        self.model = nn.ParameterList(torch.ones(shape) for shape in SHAPES)
        config = rounds(every=EVERY, compression=compression)
        self.synchronizer = LocalSynchronizer([*self.model.named_parameters()], strategy, config)
        self.rank, self._drawn = rank, torch.Generator().manual_seed(rank)
        self.added = torch.zeros(())

    def step(self, scale: float = 1.0) -> Tensor:
        self.synchronizer.complete()
        change = [torch.randn(shape, generator=self._drawn) * scale for shape in SHAPES]
        with torch.no_grad():
            for parameter, part in zip(self.model, change, strict=False):  # some may be gone
                parameter += part
        self.synchronizer.after_step()
        self.added = self.added + flat(change)
        return flat(self.model)


def flat(tensors: object) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])  # type: ignore[attr-defined]


def run(compression: str, job: Callable[[Changed], None]) -> tuple[Tensor, Tensor, Threads]:
    """Return the weights, which are every rank's, and 1 + the mean of what all have added."""
    threads = Threads(RANKS)

    def train(rank: int, strategy: Strategy) -> tuple[Tensor, Tensor]:
        training = Changed(rank, strategy, compression)
        job(training)
        training.synchronizer.average_weights()
        return flat(training.model), training.added

    weights, added = zip(*threads.run(train), strict=True)
    assert all(torch.equal(weights[0], other) for other in weights[1:])
    return weights[0], 1 + torch.stack(added).mean(0), threads


@pytest.mark.parametrize(("compression", "digits"), [("fp16", 11), ("bf16", 8)])
def test_changes_are_rounded_and_weights_are_not(compression: str, digits: int) -> None:
    # Changes of a thousandth are below half a digit of a weight of 1 in bfloat16: sent as weights they would be lost.
    def job(training: Changed) -> None:
        for _ in range(6 * EVERY):
            training.step(scale=1e-3)

    weights, exact, threads = run(compression, job)
    assert float((weights - exact).abs().max()) < 6 * 8e-3 * 2**-digits
    types = {"fp16": torch.float16, "bf16": torch.bfloat16}
    assert threads.types["weights.float32"] == types[compression]
    assert [name for name, _ in threads.messages].count("anchors.float32") == 1  # at the beginning


def test_what_powersgd_leaves_of_a_round_comes_with_later_ones() -> None:
    def job(training: Changed) -> None:
        for _ in range(EVERY):
            training.step()
        for _ in range(40 * EVERY):  # nothing is added any more, so that all that was left has been sent
            training.step(scale=0.0)

    weights, exact, threads = run("powersgd:4", job)
    assert float((weights - exact).norm() / (exact - 1).norm()) < 1e-3
    sizes = {name: size for name, size in threads.messages if name not in ("other", "anchors.float32")}
    assert sizes == {"left.float32": 4 * 64 + 48 + 1 + 1, "right.float32": 4 * 48}


@pytest.mark.parametrize("compression", ["bf16", "powersgd:1"])
@pytest.mark.parametrize("writers", [(0,), (0, 1, 2)])
def test_weights_that_the_script_writes_between_rounds_are_not_rounded(
    compression: str, writers: tuple[int, ...]
) -> None:
    new = torch.randn(sum(torch.Size(shape).numel() for shape in SHAPES), generator=torch.Generator().manual_seed(9))

    def job(training: Changed) -> None:
        for _ in range(EVERY):
            training.step(scale=0.0)
        if training.rank in writers:
            nn.utils.vector_to_parameters(new.clone(), training.model)
        for _ in range(EVERY):
            training.step(scale=0.0)

    weights, _, _ = run(compression, job)
    torch.testing.assert_close(weights, 1 + (new - 1) * len(writers) / RANKS)


@pytest.mark.parametrize("compression", ["bf16", "powersgd:1"])
def test_ranks_that_begin_with_different_weights_end_with_the_same(compression: str) -> None:
    def job(training: Changed) -> None:
        with torch.no_grad():
            training.model[0] += training.rank
        for _ in range(60 * EVERY):
            training.step(scale=0.0)

    weights, _, _ = run(compression, job)
    assert float((weights[: 64 * 48] - 2).abs().max()) < 0.01

"""Measures the cost of the library's own layer per step, in microseconds.

python benchmarks/overhead.py
horovodrun -np 2 python benchmarks/overhead.py

`Trainer.fit` and a hand-written loop take turns in one process, in blocks of a tenth of a second, with equal models and
optimizers (by hand, Horovod's DistributedOptimizer on several ranks) and the same batches. The network is so small that
a step is mostly overhead. The layer's cost is the difference of two neighbouring blocks, per step; the median over many
pairs is robust against other load. Of what the hand-written loop lacks (schedule, accumulation, uneven tail, progress),
the cost counts as the layer's; what `fit` does once, before its first step, does not.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

import trainer
from benchmarks.workloads import LEARNING_RATE, MOMENTUM
from measuring import parser_of
from trainer.data.loader import InMemory
from trainer.data.shard_plan import mix_seeds, permutation

BATCH_SIZE = 10
SEED = 0
_WARM_UP_PAIRS = 3

# Trains for one block; returns its seconds and the mean loss over all ranks.
Block = Callable[[], tuple[float, float]]


class ByHand:
    """A loop as a user would write it, with an equal model and an equal optimizer.

    Args:
        fitting: the trainer that it is compared with, which has joined the job.
    """

    def __init__(self, fitting: trainer.Trainer) -> None:
        self.model = copy.deepcopy(fitting.model)
        self.optimizer: Optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        self._strategy, self._world = fitting.strategy, fitting.world
        if self._world.size > 1:
            import horovod.torch as hvd

            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer, named_parameters=self.model.named_parameters(), groups=1
            )

    def train(self, data: InMemory) -> tuple[float, float]:
        """Train for an epoch; return its seconds and the mean loss over all ranks."""
        model, optimizer, world = self.model, self.optimizer, self._world
        torch.manual_seed(mix_seeds(SEED, world.rank))
        optimizer.zero_grad()
        started = time.perf_counter()
        total = torch.zeros((), dtype=torch.float64)
        order = permutation(len(data), epoch=0, seed=SEED)
        for start in range(world.rank * BATCH_SIZE, len(data), world.size * BATCH_SIZE):
            index = order[start : start + BATCH_SIZE]
            inputs, targets = data.inputs.index_select(0, index), data.targets.index_select(0, index)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.detach().double() * len(targets)
        mean = float(self._strategy.all_reduce(total)) / len(data)
        return time.perf_counter() - started, mean


def make_blocks(steps: int) -> tuple[trainer.Trainer, Block, Block]:
    """Return the trainer, a block of `fit` and a block of the hand-written loop. Collective.

    Raises:
        TrainerError: the two do not end with the same loss to the last bit.
    """
    torch.manual_seed(SEED)
    samples = steps * BATCH_SIZE * trainer.current_world("cpu").size
    data = InMemory(torch.randn(samples, 4), torch.randint(2, (samples,)))
    model = nn.Linear(4, 2)
    fitting = trainer.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM),
        F.cross_entropy,
        config=trainer.TrainerConfig(batch_size=BATCH_SIZE, scale_lr=False, seed=SEED, device="cpu"),
        output=None,
        progress=False,
    )
    by_hand = ByHand(fitting)

    def ours() -> tuple[float, float]:
        record = fitting.fit(data, epochs=1)[0]
        return record.seconds, record.train_loss

    losses = [ours()[1], by_hand.train(data)[1]]
    if losses[0] != losses[1]:
        raise trainer.TrainerError(f"fit ends with loss {losses[0]!r}, the hand-written loop with {losses[1]!r}")
    return fitting, ours, lambda: by_hand.train(data)


def measure(pairs: int, steps: int) -> str:
    """Time both blocks in turns; which one goes first alternates. Return what they say, in a line. Collective."""
    fitting, ours, by_hand = make_blocks(steps)
    taken: dict[Block, list[float]] = {ours: [], by_hand: []}
    for pair in range(-_WARM_UP_PAIRS, pairs):
        for block in (ours, by_hand) if pair % 2 else (by_hand, ours):
            seconds, _ = block()
            if pair >= 0:
                taken[block].append(seconds / steps * 1e6)
    differences = [a - b for a, b in zip(taken[ours], taken[by_hand], strict=True)]
    low, median, high = statistics.quantiles(differences, n=4, method="inclusive")
    fitting.strategy.close()
    return (
        f"our layer, {fitting.world.size} rank(s): {median:.1f} µs per step (quartiles {low:.1f} – {high:.1f}, {pairs} "
        f"pairs of blocks of {steps} steps; a whole step of the hand-written loop: "
        f"{statistics.median(taken[by_hand]):.0f} µs)"
    )


def main() -> None:
    trainer.report_failures()
    parser = parser_of(__doc__)
    parser.add_argument("--pairs", type=int, default=40, metavar="N", help="of blocks (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=500, metavar="N", help="in a block (default: %(default)s)")
    args = parser.parse_args()
    if args.pairs < 2 or args.steps < 1:
        parser.error("--pairs must be at least 2 and --steps at least 1")
    world = trainer.current_world("cpu")
    found = measure(args.pairs, args.steps)
    if world.is_root:
        print(found, flush=True)


if __name__ == "__main__":
    main()

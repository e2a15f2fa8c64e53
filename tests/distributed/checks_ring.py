"""What holds for the ring alone, run on every rank of one job; see `jobs`."""

from __future__ import annotations

import torch

from examples.strategies.ring import SEGMENT_BYTES, Ring, RingStrategy
from tests.distributed.checks_every_strategy import BATCH, make_trainer
from tests.distributed.reference import make_data, make_model

# Nothing, less than a rank's share, what no number of ranks divides, and several segments with a rest.
LENGTHS = (0, 1, 2, 3, 7, 1000, 1009, SEGMENT_BYTES + 13)


def check_sums_are_right_and_the_same_everywhere(strategy: RingStrategy) -> None:
    rank, size = strategy.world.rank, strategy.world.size
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32):
        for length in LENGTHS:
            pattern = torch.arange(length) % 11
            flat = (pattern + rank).to(dtype)
            strategy.sum_gradients(flat)
            assert torch.equal(flat, (pattern * size + sum(range(size))).to(dtype)), (dtype, length)


def check_inexact_sums_have_the_same_bits_everywhere(strategy: RingStrategy) -> None:
    torch.manual_seed(strategy.world.rank)
    flat = torch.randn(10007)
    strategy.sum_gradients(flat)
    assert len(set(strategy.all_gather_object(flat.numpy().tobytes()))) == 1


def check_bytes_sent_are_twice_k_times_n_minus_1_over_n(strategy: RingStrategy) -> None:
    from mpi4py import MPI

    size = strategy.world.size
    ring = Ring(MPI.COMM_WORLD.Dup())
    for length in LENGTHS:
        before = ring.bytes_sent
        ring.all_reduce(torch.zeros(length))
        sent, payload = ring.bytes_sent - before, length * 4
        assert sum(strategy.all_gather_object(sent)) == 2 * payload * (size - 1)
        # Of each rank the same, to within the element by which chunks differ, in both halves.
        assert abs(sent - 2 * payload * (size - 1) / size) < 2 * 4
        if length % size == 0:
            assert sent * size == 2 * payload * (size - 1)


def check_a_training_step_sends_each_gradient_once(strategy: RingStrategy) -> None:
    model = make_model(torch.float32)
    payload = sum(p.numel() * 4 + 4 for p in model.parameters())  # each with a number that says that it is there
    before = strategy.bytes_sent
    make_trainer(strategy, model).fit(make_data(5 * BATCH * strategy.world.size, torch.float32), epochs=1)
    sent = sum(strategy.all_gather_object(strategy.bytes_sent - before))
    assert sent == 5 * 2 * payload * (strategy.world.size - 1)

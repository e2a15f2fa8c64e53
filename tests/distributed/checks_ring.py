"""What holds for the ring alone, run on every rank of one job; see `jobs`."""

from __future__ import annotations

from unittest import mock

import torch
from torch.nn import functional as F

from examples.strategies.ring import SEGMENT_BYTES, Ring, RingStrategy
from tests.distributed.checks_every_strategy import BATCH, assert_same_on_all_ranks, make_trainer
from tests.distributed.reference import assert_equal, make_data, make_model, sgd, train_alone
from trainer import init
from trainer.strategies import buckets

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


def check_many_buckets_in_the_background_equal_one_process(strategy: RingStrategy) -> None:
    """BatchNorm's all-reduces in the backward pass run beside those of the buckets."""
    with mock.patch.object(buckets, "BUCKET_BYTES", 64):
        for settings in ({}, {"accumulate": 2}, {"sync_batch_norm": True}, {"clip_norm": 0.05}):
            normed, clip = "sync_batch_norm" in settings, 0.05 if "clip_norm" in settings else None
            batch = BATCH * strategy.world.size * (2 if "accumulate" in settings else 1)
            model, data = make_model(batch_norm=normed), make_data(3 * batch + 2)
            expected = train_alone(make_model(batch_norm=normed), data, batch=batch, clip_norm=clip)
            make_trainer(strategy, model, **settings).fit(data, epochs=1)
            assert_equal(model, expected, 1e-11)
            assert_same_on_all_ranks(strategy, model)


def check_a_rank_without_any_gradient_takes_part(strategy: RingStrategy) -> None:
    model = make_model()
    run = init(strategy)
    wrapped, optimizer = run.prepare(model, sgd(model))
    data = make_data(8).to(run.device)
    for _ in range(3):
        optimizer.zero_grad()
        if strategy.world.is_root:
            run.backward(F.cross_entropy(wrapped(data.inputs), data.targets))
        optimizer.step()
    assert_same_on_all_ranks(strategy, model)

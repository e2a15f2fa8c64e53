"""What holds for Horovod alone, run on every rank of one job; see `jobs`."""

from __future__ import annotations

from unittest import mock

import horovod.torch as hvd
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.distributed.checks_every_strategy import assert_equal_everywhere, assert_same_on_all_ranks, make_trainer
from tests.distributed.reference import fingerprint, make_data, make_model, sgd, train_alone
from trainer import ConfigError, InMemory, init
from trainer.data.shard_plan import mix_seeds, permutation
from trainer.strategies import buckets
from trainer.strategies.base import Strategy

BATCH, STEPS = 4, 15


def with_dropout(model: nn.Module) -> nn.Module:
    return nn.Sequential(*list(model)[:-1], nn.Dropout(0.5), list(model)[-1])  # type: ignore[call-overload]


def train_by_hand(model: nn.Module, data: InMemory, device: torch.device) -> None:
    """Horovod as its documentation has it, over the same samples in the same order, with the same dropout."""
    model.to(device)
    data = data.to(device)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    torch.manual_seed(mix_seeds(0, hvd.rank()))
    for epoch in range(2):
        order = permutation(len(data), epoch=epoch, seed=0)
        for step in range(STEPS):
            begin = (step * hvd.size() + hvd.rank()) * BATCH
            index = order[begin : begin + BATCH]
            optimizer.zero_grad()
            F.cross_entropy(model(data.inputs[index]), data.targets[index]).backward()
            optimizer.step()


def check_trainer_equals_a_hand_written_loop_bit_for_bit(strategy: Strategy) -> None:
    data = make_data(BATCH * STEPS * strategy.world.size, torch.float32)
    ours, by_hand = with_dropout(make_model(torch.float32)), with_dropout(make_model(torch.float32))
    make_trainer(strategy, ours).fit(data, epochs=2)
    train_by_hand(by_hand, data, strategy.world.device)
    assert fingerprint(ours) == fingerprint(by_hand)
    assert_same_on_all_ranks(strategy, ours)


def check_an_optimizer_that_all_reduces_by_itself_is_refused(strategy: Strategy) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    with pytest.raises(ConfigError, match="the optimizer is Horovod's DistributedOptimizer"):
        init(strategy).prepare(model, optimizer)


def check_many_buckets_equal_one_process(strategy: Strategy) -> None:
    made = mock.patch.object(hvd, "DistributedOptimizer", wraps=hvd.DistributedOptimizer)
    with mock.patch.object(buckets, "BUCKET_BYTES", 64), made as optimizer:
        _train_with_each_setting(strategy)
    assert optimizer.called
    assert all(len(call.kwargs["groups"]) > 2 for call in optimizer.call_args_list)


def _train_with_each_setting(strategy: Strategy) -> None:
    for settings in ({}, {"accumulate": 2}, {"clip_norm": 0.05}):
        batch = BATCH * strategy.world.size * (2 if "accumulate" in settings else 1)
        model, data = make_model(), make_data(3 * batch + 2)
        expected = train_alone(make_model(), data, batch=batch, clip_norm=settings.get("clip_norm"))
        make_trainer(strategy, model, batch_size=BATCH, **settings).fit(data, epochs=1)
        assert_equal_everywhere(strategy, model, expected, 1e-11)


def check_complex_and_bfloat16_gradients_keep_their_types(strategy: Strategy) -> None:
    """They are sent in others, and a rank without a gradient sends one in the same."""
    size, rank = strategy.world.size, strategy.world.rank
    for compression in ("none", "fp16", "bf16"):
        run = init(strategy, compression=compression)
        waves, halves = (nn.Parameter(torch.ones(3, dtype=kind)) for kind in (torch.complex64, torch.bfloat16))
        run.prepare(nn.ParameterList([waves, halves]))
        for users in (size, 1):  # all ranks, then the first alone
            of_waves = (2 * waves.real + 3 * waves.imag).sum() * (1 if rank < users else 0)
            run.backward(of_waves + halves.float().sum() if rank < users else of_waves)
            assert waves.grad is not None
            assert halves.grad is not None
            assert (waves.grad.dtype, halves.grad.dtype) == (torch.complex64, torch.bfloat16)
            share = users / size
            assert torch.allclose(waves.grad.cpu(), torch.full((3,), complex(2 * share, 3 * share)), rtol=1e-2)
            assert torch.allclose(halves.grad.float().cpu(), torch.full((3,), share), rtol=1e-2)
            waves.grad = halves.grad = None

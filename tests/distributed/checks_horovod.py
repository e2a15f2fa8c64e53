"""What holds for Horovod alone, run on every rank of one job; see `test_horovod`."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.distributed.checks_every_strategy import assert_same_on_all_ranks, make_trainer
from tests.distributed.reference import fingerprint, make_data, make_model, sgd
from trainer import ConfigError, InMemory, TrainerConfig, prepare
from trainer.data.shard_plan import mix_seeds, permutation
from trainer.strategies.base import Strategy

BATCH, STEPS = 4, 15


def with_dropout(model: nn.Module) -> nn.Module:
    return nn.Sequential(*list(model)[:-1], nn.Dropout(0.5), list(model)[-1])  # type: ignore[call-overload]


def train_by_hand(model: nn.Module, data: InMemory) -> None:
    """Horovod as its documentation has it, over the same samples in the same order, with the same dropout."""
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
    train_by_hand(by_hand, data)
    assert fingerprint(ours) == fingerprint(by_hand)
    assert_same_on_all_ranks(strategy, ours)


def check_adasum_of_equal_steps_is_that_step(strategy: Strategy) -> None:
    """Maleki et al. (2020): parallel gradients are averaged, orthogonal ones added; equal ones are parallel."""
    if not hvd.mpi_enabled():
        return
    model, alone = make_model(torch.float32), make_model(torch.float32)
    inputs, targets = (tensor[:BATCH] for tensor in (make_data(8, torch.float32).inputs, make_data(8).targets))
    config = TrainerConfig(reduction="adasum", device="cpu")
    wrapped, optimizer = prepare(model, sgd(model), strategy=strategy, config=config)
    by_itself = sgd(alone)
    for step_model, step_optimizer in ((wrapped, optimizer), (alone, by_itself)):
        step_optimizer.zero_grad()
        F.cross_entropy(step_model(inputs), targets).backward()
        step_optimizer.step()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    assert_same_on_all_ranks(strategy, model)


def check_adasum_trains_without_scaling(strategy: Strategy) -> None:
    if not hvd.mpi_enabled():
        return
    data, model = make_data(40 * BATCH * strategy.world.size, torch.float32), make_model(torch.float32)
    trainer = make_trainer(strategy, model, reduction="adasum", accumulate=2, scale_lr=True)
    before = trainer.evaluate(data).metrics["loss"]
    last = trainer.fit(data, data, epochs=3)[-1]
    assert last.learning_rate == 0.1
    assert last.validation is not None
    assert last.validation.metrics["loss"] < 0.8 * before
    assert_same_on_all_ranks(strategy, model)


def check_adasum_needs_mpi(strategy: Strategy) -> None:
    if hvd.mpi_enabled():
        return
    model = make_model()
    with pytest.raises(ConfigError, match="--mpi"):
        prepare(model, sgd(model), strategy=strategy, config=TrainerConfig(reduction="adasum", device="cpu"))

"""The handle where something is unusual or wrong, the same under every strategy; run on every rank of one job."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F

from tests.distributed.checks_every_strategy import BATCH, assert_same_on_all_ranks
from tests.distributed.reference import assert_equal, make_data, make_model, sgd
from trainer import ConfigError, Run, TrainerError, init
from trainer.models.sharded import gather
from trainer.strategies.base import Strategy
from trainer.strategies.single import SingleStrategy

CLIP = 0.05


def one_batch(strategy: Strategy) -> tuple[Run, nn.Module, Any, torch.optim.Optimizer, Any]:
    """Return a handle with a prepared model and optimizer, and this rank's only batch of an epoch."""
    run, model = init(strategy), make_model()
    forward, optimizer = run.prepare(model, sgd(model))
    (batch,) = run.loader(make_data(BATCH * strategy.world.size), BATCH)
    return run, model, forward, optimizer, batch


def check_a_plain_backward_is_told(strategy: Strategy) -> None:
    run, _, forward, optimizer, batch = one_batch(strategy)
    run.backward(F.cross_entropy(forward(batch[0]), batch[1]))  # an earlier one does not make up for it
    optimizer.step()
    optimizer.zero_grad()
    if strategy.world.size == 1:  # nothing is on its way there: it is told of when the step comes
        F.cross_entropy(forward(batch[0]), batch[1]).backward()
        with pytest.raises(TrainerError, match=r"run\.backward has not returned since its last step"):
            optimizer.step()
        return
    run.backward(F.cross_entropy(forward(batch[0]), batch[1]))
    with pytest.raises(TrainerError, match=r"call run.backward\(loss\) instead"):
        F.cross_entropy(forward(batch[0]), batch[1]).backward()
    strategy.barrier()


def check_a_second_step_on_the_same_gradients_is_told(strategy: Strategy) -> None:
    run, _, forward, optimizer, batch = one_batch(strategy)
    run.backward(F.cross_entropy(forward(batch[0]), batch[1]))
    optimizer.step()
    with pytest.raises(TrainerError, match=r"run.backward has not returned since its last step"):
        optimizer.step()
    optimizer.zero_grad()


def check_a_step_within_the_pass_is_told(strategy: Strategy) -> None:
    run, model, forward, optimizer, batch = one_batch(strategy)
    run.backward(F.cross_entropy(forward(batch[0]), batch[1]))  # an earlier one does not make up for it
    hook = next(model.parameters()).register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(TrainerError, match=r"run.backward has not returned since its last step; .* no gradient's hook"):
        run.backward(F.cross_entropy(forward(batch[0]), batch[1]))
    hook.remove()
    optimizer.zero_grad()
    run.backward(F.cross_entropy(forward(batch[0]), batch[1]))  # which also ends the pass before
    optimizer.step()


def check_an_evaluation_may_be_in_inference_mode(strategy: Strategy) -> None:
    run, _, forward, optimizer, batch = one_batch(strategy)
    means = []
    for mode in (torch.inference_mode, torch.no_grad):
        mean = run.mean()
        with mode():
            for inputs, targets in run.loader(make_data(BATCH * run.world_size + 1), BATCH, training=False):
                mean.add(F.cross_entropy(forward(inputs), targets))
            means.append(mean.read())
            assert run.all_gather(torch.tensor(run.rank)) == list(range(run.world_size))
            assert run.broadcast(torch.tensor(run.rank)) == 0
    assert means[0] == pytest.approx(means[1])
    run.backward(F.cross_entropy(forward(batch[0]), batch[1]))
    optimizer.step()


def check_a_prepared_model_may_change_its_type(strategy: Strategy) -> None:
    if strategy.shards:  # PyTorch keeps what it gathers into, in the first type
        return
    run, model, forward, optimizer, (inputs, targets) = one_batch(strategy)
    for kind in (torch.float32, torch.float64):
        model.to(kind)
        optimizer.zero_grad()
        run.backward(F.cross_entropy(forward(inputs.to(kind)), targets))
        optimizer.step()
        assert_same_on_all_ranks(strategy, model)
    expected = make_model()
    whole = sgd(expected)
    data = make_data(BATCH * run.world_size)
    for _ in range(2):
        whole.zero_grad()
        F.cross_entropy(expected(data.inputs), data.targets).backward()
        whole.step()
    assert_equal(model, expected, 1e-5)


def check_what_cannot_be_prepared_or_scripted_is_told(strategy: Strategy) -> None:
    if strategy.world.size == 1:
        return
    model = make_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ConfigError, match="the optimizer is ZeroRedundancyOptimizer"):
        init(strategy).prepare(model, optimizer)
    if not strategy.shards:
        with pytest.raises(AttributeError, match=r"torch\.jit\.script compiles the hook"):
            torch.jit.script(model)


def check_a_step_within_an_update_is_told(strategy: Strategy) -> None:
    model, data = make_model(), make_data(4 * BATCH * strategy.world.size)
    run = init(strategy, accumulate=2)
    forward, optimizer = run.prepare(model, sgd(model))
    batches = iter(run.loader(data, BATCH))
    inputs, targets = next(batches)
    run.backward(F.cross_entropy(forward(inputs), targets))
    with pytest.raises(TrainerError, match=r"2 batches were complete; the last batch of an epoch closes an update"):
        optimizer.step()
    inputs, targets = next(batches)
    run.backward(F.cross_entropy(forward(inputs), targets))
    optimizer.step()
    assert_same_on_all_ranks(strategy, model)


def check_parameters_that_are_unfrozen_or_added_later_are_told(strategy: Strategy) -> None:
    model, data = make_model(), make_data(BATCH * strategy.world.size)
    first, *others = model.parameters()
    first.requires_grad_(False)
    run = init(strategy)
    forward, optimizer = run.prepare(model, torch.optim.SGD(others, lr=0.1))
    (batch,) = run.loader(data, BATCH)
    first, *others = model.parameters()  # which a strategy that shards has put there
    if not isinstance(strategy, SingleStrategy):
        first.requires_grad_(True)
        run.prepare(nn.Linear(1, 1))  # which does not make up for it
        with pytest.raises(TrainerError, match=r"were unfrozen after run\.prepare"):
            run.backward(F.cross_entropy(forward(batch[0]), batch[1]))
    first.requires_grad_(True)
    optimizer.add_param_group({"params": [first], "lr": 0.2})
    forward, optimizer = run.prepare(model, optimizer)
    run.backward(F.cross_entropy(forward(batch[0]), batch[1]))
    optimizer.step()
    assert_same_on_all_ranks(strategy, model)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(TrainerError, match=r"holds 1 parameters that the model does not have"):
        optimizer.step()


def check_a_frozen_model_beside_another_is_told_when_it_is_unfrozen(strategy: Strategy) -> None:
    model, data = make_model(), make_data(BATCH * strategy.world.size)
    frozen = nn.Linear(1, 1, dtype=torch.float64)
    frozen.requires_grad_(False)
    run = init(strategy)
    frozen, forward, _ = run.prepare(frozen, model, torch.optim.SGD(model.parameters(), lr=0.1))
    (batch,) = run.loader(data, BATCH)
    frozen.requires_grad_(True)
    if not isinstance(strategy, SingleStrategy):
        with pytest.raises(TrainerError, match=r"were unfrozen after run\.prepare"):
            run.backward(F.cross_entropy(forward(batch[0]), batch[1]))


def check_values_of_all_ranks(strategy: Strategy) -> None:
    run = init(strategy)
    ranks = torch.arange(run.world_size, dtype=torch.float64)
    own = torch.tensor([float(run.rank), 1.0], dtype=torch.float64)
    assert run.all_reduce(own).tolist() == [float(ranks.mean()), 1.0]
    assert own.tolist() == [float(run.rank), 1.0], "the argument is not changed"
    assert run.all_reduce(run.rank + 1, "sum").item() == ranks.sum() + run.world_size
    assert run.all_gather({"rank": run.rank}) == [{"rank": rank} for rank in range(run.world_size)]
    assert run.broadcast(f"from {run.rank}", root=run.world_size - 1) == f"from {run.world_size - 1}"
    size = run.world_size
    assert run.all_reduce(run.is_root, "sum").item() == 1
    assert run.all_reduce(torch.tensor([True, False]), "sum").tolist() == [size, 0]
    assert run.all_reduce(torch.ones(3, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert run.all_reduce(torch.arange(6.0).view(2, 3).t()).tolist() == torch.arange(6.0).view(2, 3).t().tolist()
    assert run.all_reduce(16777217.0).item() == 16777217.0
    with pytest.raises(ConfigError, match="reduction is 'max'; valid are mean, sum"):
        run.all_reduce(own, "max")
    run.barrier()


def check_a_loop_that_is_left_early(strategy: Strategy) -> None:
    """In the middle of an update: what follows, with a batch from elsewhere, is weighed and synchronized as usual."""
    model, data = make_model(), make_data(4 * BATCH * strategy.world.size)
    run = init(strategy, accumulate=3)
    forward, optimizer = run.prepare(model, sgd(model))
    for inputs, targets in run.loader(data, BATCH):
        run.backward(F.cross_entropy(forward(inputs), targets))
        break
    assert run.sync_gradients
    optimizer.zero_grad()
    run.backward(forward(data.inputs[:BATCH].to(run.device) + run.rank).square().mean())
    optimizer.step()
    assert_same_on_all_ranks(strategy, model)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ArithmeticError("out of memory, say")


def check_an_error_in_a_backward_pass_may_be_caught(strategy: Strategy) -> None:
    run, model, forward, optimizer, batch = one_batch(strategy)
    with pytest.raises(ArithmeticError):
        run.backward(Fails.apply(forward(Fails.apply(batch[0].requires_grad_()))).sum())
    optimizer.zero_grad()
    run.backward(F.cross_entropy(forward(batch[0].detach()), batch[1]))
    optimizer.step()
    assert_same_on_all_ranks(strategy, model)


def check_models_that_share_parameters_are_refused(strategy: Strategy) -> None:
    encoder = nn.Linear(3, 3)
    with pytest.raises(ConfigError, match="share parameters, and each gradient is all-reduced once"):
        init(strategy).prepare(encoder, nn.Sequential(encoder, nn.ReLU()))


def check_fp16_with_two_optimizers_of_which_one_overflows_on_one_rank(strategy: Strategy) -> None:
    """All ranks skip the same optimizer's step, and take the other's."""
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    run = init(strategy, precision="fp16")
    forwards = run.prepare(*models)
    optimizers = [run.prepare(torch.optim.SGD(model.parameters(), lr=1.0)) for model in models]
    scaler, ones = torch.amp.GradScaler(run.device.type), torch.ones(1, 1, device=run.device)
    before = [gather(model.weight).item() for model in models]
    for is_large in (False, True, False):
        factor = 1e36 if is_large and run.rank == run.world_size - 1 else 1.0
        run.backward(scaler.scale(forwards[0](ones * factor).sum() + forwards[1](ones).sum()))
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_value_(models[0].parameters(), 1.0)  # which makes the infinity finite
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    assert [gather(model.weight).item() for model in models] == pytest.approx([before[0] - 2, before[1] - 3], abs=1e-3)


def check_fp16_without_a_scaler_or_with_gradients_that_are_not_complete_is_told(strategy: Strategy) -> None:
    run, model = init(strategy, precision="fp16"), nn.Linear(1, 1, bias=False)
    forward, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    scaler, ones = torch.amp.GradScaler(run.device.type), torch.ones(1, 1, device=run.device)
    run.backward(forward(ones).sum())
    with pytest.raises(TrainerError, match=r"optimizer\.step\(\) was not called by an enabled GradScaler"):
        optimizer.step()
    with pytest.raises(ConfigError, match="a closure cannot be combined with fp16"):
        optimizer.step(lambda: 0.0)
    optimizer.zero_grad()
    if run.world_size == 1 or strategy.shards:  # where no pass may be the last one within no_sync
        return
    with run.no_sync():
        run.backward(scaler.scale(forward(ones).sum()))
    with pytest.raises(TrainerError, match=r"run\.synchronize\(\) after run\.no_sync"):
        scaler.step(optimizer)


def check_sparse_gradients_are_exchanged_or_refused(strategy: Strategy) -> None:
    run, table = init(strategy), nn.Embedding(10, 4, sparse=True)
    size = run.world_size
    if strategy.shards:
        with pytest.raises(ConfigError, match="has sparse gradients"):
            run.prepare(table, torch.optim.SGD(table.parameters(), lr=1.0))
        return
    forward, optimizer = run.prepare(table, torch.optim.SGD(table.parameters(), lr=1.0))
    before = table.weight.detach().cpu().clone()
    run.backward(forward(torch.tensor([1, 2 + run.rank], device=run.device)).sum())
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    optimizer.step()
    moved = (before - table.weight.detach().cpu()).sum(1)
    expected = torch.zeros(10)
    expected[1] = 4
    expected[2 : 2 + size] = 4 / size
    assert torch.allclose(moved, expected, atol=1e-5)


class Table(nn.Module):
    """A table of ten rows with sparse gradients; as an output layer it adds a dense one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)

    def forward(self, rows: list[int], output: bool) -> torch.Tensor:
        weight = self.table.weight
        used = weight.sum() * 0.0 if not rows else self.table(torch.tensor(rows, device=weight.device)).sum()
        return used + F.linear(torch.ones(1, 4, device=weight.device), weight).sum() if output else used


def check_a_table_of_which_a_rank_uses_no_row_or_every_row(strategy: Strategy) -> None:
    """A rank without a gradient gets a sparse one, as SparseAdam needs; another layer may have the weight as well."""
    if strategy.shards:
        return
    size, rank = strategy.world.size, strategy.world.rank
    run, model, unused = init(strategy), Table(), nn.Linear(1, 1)
    run.prepare(nn.ModuleDict({"model": model, "unused": unused}))
    for user in range(size):
        if rank == user:
            run.backward(model([1, 1, 2], output=False))
        else:
            run.backward(unused(torch.ones(1, 1, device=run.device)).sum() * 0.0)
        gradient = model.table.weight.grad
        assert gradient is not None
        assert gradient.is_sparse
        expected = torch.zeros(10, 4)
        expected[1], expected[2] = 2 / size, 1 / size
        assert torch.allclose(gradient.to_dense().cpu(), expected)
        model.table.weight.grad = unused.weight.grad = unused.bias.grad = None
    run.backward(model([1], output=rank == 0))
    gradient = model.table.weight.grad
    assert gradient is not None
    assert gradient.is_sparse == (rank != 0)
    expected = torch.full((10, 4), 1 / size)
    expected[1] += 1
    assert torch.allclose(gradient.to_dense().cpu(), expected)

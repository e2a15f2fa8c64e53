"""What a loop of one's own may do on the handle, the same under every strategy; run on every rank of one job."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.checks_every_strategy import BATCH, assert_equal_everywhere, assert_same_on_all_ranks
from tests.distributed.reference import adam, assert_equal, make_data, make_model, sgd, train_alone
from trainer import ConfigError, InMemory, init
from trainer.data.shard_plan import permutation
from trainer.strategies.base import Strategy

CLIP = 0.05


def global_batches(data: InMemory, batch: int) -> list[Tensor]:
    return list(permutation(len(data), epoch=0, seed=0).split(batch))


def assert_local(strategy: Strategy, model: nn.Module) -> None:
    """The gradients are those of this rank alone, which has other samples than the others."""
    if strategy.shards:  # they are kept where nobody can read them
        return
    sums = strategy.all_gather_object([float(p.grad.sum()) for p in model.parameters() if p.grad is not None])
    assert len({tuple(one) for one in sums}) == strategy.world.size


def check_accumulation_by_the_loader_equals_one_big_batch(strategy: Strategy) -> None:
    for extra in (0, 1, BATCH * strategy.world.size + 1):
        model, data = make_model(), make_data(6 * BATCH * strategy.world.size + extra)
        expected = train_alone(model, data, batch=3 * BATCH * strategy.world.size, clip_norm=CLIP)
        run = init(strategy, accumulate=3)
        forward, optimizer = run.prepare(model, sgd(model))
        for inputs, targets in run.loader(data, BATCH):
            run.backward(F.cross_entropy(forward(inputs), targets))
            if not run.sync_gradients:
                assert_local(strategy, model)
            else:
                run.clip_grad_norm_(forward, CLIP)
                optimizer.step()
                optimizer.zero_grad()
        assert_equal_everywhere(strategy, model, expected, 1e-12)


def check_the_usual_accumulation_equals_one_big_batch(strategy: Strategy) -> None:
    """`(number + 1) % k`, with and without `no_sync`: each backward pass adds to gradients that are on their way."""
    for local in (False, True):
        model, data = make_model(), make_data(6 * BATCH * strategy.world.size)
        expected = train_alone(model, data, batch=3 * BATCH * strategy.world.size)
        run = init(strategy)
        forward, optimizer = run.prepare(model, sgd(model))
        for number, (inputs, targets) in enumerate(run.loader(data, BATCH)):
            if local and (number + 1) % 3:
                with run.no_sync():
                    run.backward(F.cross_entropy(forward(inputs), targets) / 3)
                assert_local(strategy, model)
                continue
            run.backward(F.cross_entropy(forward(inputs), targets) / 3)
            if (number + 1) % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
        assert_equal_everywhere(strategy, model, expected, 1e-12)


def step_with_closure(
    optimizer: torch.optim.Optimizer, model: nn.Module, inputs: Tensor, targets: Tensor, backward: Any
) -> float:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        backward(loss)
        return loss

    return float(torch.as_tensor(optimizer.step(closure)).detach())


def check_a_closure_sees_the_gradient_and_the_loss_of_all_ranks(strategy: Strategy) -> None:
    data = make_data(3 * BATCH * strategy.world.size)  # few steps, because LBFGS amplifies the last bit

    def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")

    for make in (sgd, lbfgs):
        model, alone = make_model(), make_model()
        run = init(strategy)
        if strategy.shards and make is lbfgs:
            with pytest.raises(ConfigError, match="LBFGS does not work on sharded parameters"):
                run.prepare(model, lbfgs(model))
            return
        forward, optimizer = run.prepare(model, make(model))
        by_hand = make(alone)
        for index, (inputs, targets) in zip(
            global_batches(data, BATCH * run.world_size), run.loader(data, BATCH), strict=True
        ):
            found = step_with_closure(optimizer, forward, inputs, targets, run.backward)
            expected = step_with_closure(by_hand, alone, data.inputs[index], data.targets[index], Tensor.backward)
            assert abs(found - expected) < 1e-10
        assert_equal_everywhere(strategy, model, alone, 1e-9)


def check_the_optimizer_stays_the_users_own(strategy: Strategy) -> None:
    """Its class, its attributes, its state, and a scheduler that was made before."""

    class Marked(torch.optim.SGD):
        def __init__(self, parameters: Any, needed: str) -> None:
            super().__init__(parameters, lr=0.1, momentum=0.9)
            self.needed = needed

    model, data = make_model(), make_data(2 * BATCH * strategy.world.size)
    own = Marked(model.parameters(), "value")
    schedule = torch.optim.lr_scheduler.StepLR(own, step_size=1, gamma=0.5)
    run = init(strategy)
    forward, optimizer = run.prepare(model, own)
    assert optimizer is own
    for inputs, targets in run.loader(data, BATCH):
        optimizer.zero_grad()
        run.backward(F.cross_entropy(forward(inputs), targets))
        optimizer.step()
        schedule.step()
    assert (own.needed, own.param_groups[0]["lr"]) == ("value", 0.025)
    assert set(own.state_dict()["state"]) == set(range(len(list(model.parameters()))))
    own.load_state_dict(copy.deepcopy(own.state_dict()))
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.0125


def check_a_state_dict_has_the_models_own_names(strategy: Strategy) -> None:
    model = make_model(batch_norm=True)
    model.describe = lambda: "mine"  # type: ignore[assignment]
    run = init(strategy)
    forward, _ = run.prepare(model, sgd(model))
    assert list(forward.state_dict()) == list(model.state_dict())
    assert [name for name, _ in forward.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert [name for name, _ in forward.named_buffers()] == [name for name, _ in model.named_buffers()]
    assert forward.describe() == "mine"  # type: ignore[operator]
    assert run.unwrap(forward) is model
    forward.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    assert not any(bool(parameter.any()) for parameter in model.parameters())


def check_two_models_with_two_optimizers(strategy: Strategy) -> None:
    """As a GAN has them: each step sends gradients through the other model as well."""

    def train(models: Any, optimizers: Any, batch: Tensor, backward: Any) -> None:
        (generator, critic), (first, second) = models, optimizers
        second.zero_grad()
        backward(critic(generator(batch).detach()).square().mean())
        backward(critic(batch).sub(1).square().mean())
        second.step()
        first.zero_grad()
        backward(critic(generator(batch)).sub(1).square().mean())
        first.step()

    def make() -> tuple[nn.Module, nn.Module]:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return nn.Linear(5, 5).double(), nn.Linear(5, 1).double()

    noise = torch.randn(3 * BATCH * strategy.world.size, 5, generator=torch.Generator().manual_seed(1)).double()
    data = InMemory(noise, torch.zeros(len(noise)))
    models, alone = make(), make()
    by_hand = [adam(model) for model in alone]
    run = init(strategy)
    forward_generator, forward_critic, *optimizers = run.prepare(*models, *[adam(model) for model in models])
    for index, (inputs, _) in zip(global_batches(data, BATCH * run.world_size), run.loader(data, BATCH), strict=True):
        train((forward_generator, forward_critic), optimizers, inputs, run.backward)
        train(alone, by_hand, noise[index], Tensor.backward)
    for found, expected in zip(models, alone, strict=True):
        assert_equal_everywhere(strategy, found, expected, 1e-11)


def check_any_forward_pass_of_the_model_is_synchronized(strategy: Strategy) -> None:
    """The model itself instead of what `prepare` returns, a method of it, and a pass within `no_sync`."""
    data = make_data(3 * BATCH * strategy.world.size)
    expected = train_alone(make_model(), data, batch=BATCH * strategy.world.size)

    class WithMethod(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_model()

        def forward(self, inputs: Tensor) -> Any:
            return self.inner(inputs)

        def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(self.inner(inputs), targets)

    # A strategy that shards gathers parameters in a pass of the model itself, and sums no gradients after no_sync.
    for way in ("itself",) if strategy.shards else ("itself", "method", "no_sync"):
        model = WithMethod()
        run = init(strategy)
        forward, optimizer = run.prepare(model, sgd(model))
        for inputs, targets in run.loader(data, BATCH):
            optimizer.zero_grad()
            if way == "no_sync":
                with run.no_sync():
                    run.backward(F.cross_entropy(forward(inputs), targets))
            else:
                run.backward(
                    F.cross_entropy(model(inputs), targets) if way == "itself" else forward.loss(inputs, targets)
                )
            optimizer.step()
        assert_equal(model.inner, expected, 1e-12)
        assert_same_on_all_ranks(strategy, model)

"""Training loops as scripts have them, each written once: alone on whole batches, and on every rank of one job.

What stands between the backward pass and the step reads and changes gradients as it does in one process.
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.distributed.checks_every_strategy import BATCH, assert_same_on_all_ranks, train_on
from tests.distributed.reference import assert_equal, make_data, make_model, sgd
from trainer import TrainerError, init
from trainer.data.shard_plan import permutation
from trainer.strategies.base import Strategy

Batches = list[tuple[Tensor, Tensor]]
Loop = Callable[[nn.Module, Any, Callable[..., None], Batches], None]


def loss_of(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def with_a_grad_scaler(model: nn.Module, optimizer: Any, backward: Callable[..., None], batches: Batches) -> None:
    scaler = torch.amp.GradScaler(batches[0][0].device.type)
    for batch in batches:
        optimizer.zero_grad()
        backward(scaler.scale(loss_of(model, batch)))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()


def with_an_optimizer_that_was_not_prepared(
    model: nn.Module, optimizer: Any, backward: Callable[..., None], batches: Batches
) -> None:
    other = torch.optim.Adam(model.parameters(), lr=0.01)
    for batch in batches:
        other.zero_grad()
        backward(loss_of(model, batch))
        other.step()


def with_hooks_that_come_late(
    model: nn.Module, optimizer: Any, backward: Callable[..., None], batches: Batches
) -> None:
    def shrink(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5).clamp_(-1, 1)

    hooks = [parameter.register_post_accumulate_grad_hook(shrink) for parameter in model.parameters()]
    for batch in batches:
        optimizer.zero_grad()
        backward(loss_of(model, batch) / 4)  # within the bounds of the clamp, which is not linear
        optimizer.step()
    for hook in hooks:
        hook.remove()


def with_gradients_that_are_kept(
    model: nn.Module, optimizer: Any, backward: Callable[..., None], batches: Batches
) -> None:
    """As gradient surgery does (Yu et al. 2020): both tasks' gradients are looked at together."""
    for first, second in itertools.pairwise(batches):
        kept = []
        for batch in (first, second):
            optimizer.zero_grad(set_to_none=True)
            backward(loss_of(model, batch))
            kept.append([parameter.grad for parameter in model.parameters()])
        for parameter, one, other in zip(model.parameters(), *kept, strict=True):
            parameter.grad = one + 2 * other
        optimizer.step()


def with_two_losses_of_one_pass(
    model: nn.Module, optimizer: Any, backward: Callable[..., None], batches: Batches
) -> None:
    for inputs, targets in batches:
        optimizer.zero_grad(set_to_none=False)
        outputs = model(inputs)
        backward(F.cross_entropy(outputs, targets), retain_graph=True)
        backward(outputs[:, :2].square().mean())
        optimizer.step()


def with_passes_that_reach_a_part(
    model: nn.Module, optimizer: Any, backward: Callable[..., None], batches: Batches
) -> None:
    """The first layer's weight alone gets a gradient in the first pass, and the last layer none before the second."""
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        backward(model[0].weight.square().mean())  # type: ignore[index]
        if number % 2:
            backward(loss_of(model, batch))
        optimizer.step()


def with_what_backward_takes(model: nn.Module, optimizer: Any, backward: Callable[..., None], batches: Batches) -> None:
    for number, (inputs, targets) in enumerate(batches):
        optimizer.zero_grad()
        losses = F.cross_entropy(model(inputs), targets, reduction="none")
        weights = torch.full_like(losses, 1 / len(losses))
        backward(losses, weights, inputs=list(model[0].parameters()) if number % 2 else None)  # type: ignore[index]
        optimizer.step()


def with_a_penalty_on_gradients(
    model: nn.Module, optimizer: Any, backward: Callable[..., None], batches: Batches
) -> None:
    """As critics of GANs have it (Gulrajani et al. 2017)."""
    for inputs, targets in batches:
        optimizer.zero_grad()
        watched = inputs.clone().requires_grad_()
        outputs = model(watched)
        (slope,) = torch.autograd.grad(outputs.square().sum(), watched, create_graph=True)
        backward(F.cross_entropy(outputs, targets) + slope.square().sum(1).mean())
        optimizer.step()


LOOPS: list[Loop] = [
    with_a_grad_scaler,
    with_an_optimizer_that_was_not_prepared,
    with_hooks_that_come_late,
    with_gradients_that_are_kept,
    with_two_losses_of_one_pass,
    with_passes_that_reach_a_part,
    with_what_backward_takes,
    with_a_penalty_on_gradients,
]


def check_loops_equal_one_process(strategy: Strategy) -> None:
    if strategy.shards:  # whose parameters are others after `prepare`, and need gradients all at once
        return
    world, device = strategy.world, strategy.world.device
    data = make_data(5 * BATCH * world.size).to(device)
    whole = [*zip(data.inputs.split(BATCH * world.size), data.targets.split(BATCH * world.size), strict=True)]
    own = [(inputs[world.rank :: world.size], targets[world.rank :: world.size]) for inputs, targets in whole]
    for loop in LOOPS:
        expected, model = make_model().to(device), make_model()
        loop(expected, sgd(expected), Tensor.backward, whole)
        run = init(strategy)
        forward, optimizer = run.prepare(model, sgd(model))
        loop(forward, optimizer, run.backward, own)
        try:
            assert_equal(model, expected, 1e-10)
        except AssertionError as error:
            raise AssertionError(f"{loop.__name__}: {error}") from None
        assert_same_on_all_ranks(strategy, model)


def check_a_gradient_that_shares_memory_with_the_running_pass_is_sent_without_harm(strategy: Strategy) -> None:
    """Autograd gives `position` a view of the gradient of what it is added to, which the pass goes on with."""
    if strategy.shards:
        return
    world = strategy.world

    def pass_over(rank: int, linear: nn.Module, position: nn.Parameter, backward: Callable[..., None]) -> None:
        inputs = torch.full((1, 512, 512), rank + 1.0, device=world.device)
        embedded = linear(inputs)
        embedded.register_hook(lambda _: time.sleep(0.1))  # in which the other gradient may arrive
        backward((embedded + position.unsqueeze(0)).square().sum())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng():
                torch.manual_seed(0)
                self.linear = nn.Linear(512, 4096)  # which fills a bucket, as the position does
            self.position = nn.Parameter(torch.zeros(512, 4096))

    alone = Model().to(world.device)
    for rank in range(world.size):
        pass_over(rank, alone.linear, alone.position, lambda loss: (loss / world.size).backward())
    run, model = init(strategy), Model()
    run.prepare(model)
    pass_over(world.rank, model.linear, model.position, run.backward)
    for own, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert own.grad is not None
        assert expected.grad is not None
        assert float((own.grad - expected.grad).norm()) < 1e-3 * float(expected.grad.norm())


def check_a_pass_that_trains_no_prepared_model_is_told_once(strategy: Strategy) -> None:
    if strategy.shards:  # whose passes nobody follows
        return
    run, model = init(strategy), make_model()
    run.prepare(model, sgd(model))
    other, data = make_model().to(run.device), make_data(BATCH).to(run.device)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        for _ in range(2):
            run.backward(F.cross_entropy(other(data.inputs), data.targets))
    told = run.is_root and run.world_size > 1
    assert printed.getvalue().count("has reached no parameter of a model that was prepared") == told


def check_a_graph_of_the_mean_gradients_is_refused(strategy: Strategy) -> None:
    run, model = init(strategy), make_model()
    forward, _ = run.prepare(model, sgd(model))
    with pytest.raises(TrainerError, match=r"torch\.autograd\.grad\(\.\.\., create_graph=True\)"):
        run.backward(forward(make_data(BATCH).inputs.to(run.device)).sum(), create_graph=True)


class Repeated(nn.Module):
    """A block that is used twice, whose activations are computed anew in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.last, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 4), reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.requires_grad_()
        for _ in range(2):
            inputs = checkpoint(self.block, inputs, use_reentrant=self.reentrant)
        result: Tensor = self.last(inputs)
        return result


def check_reentrant_checkpointing_of_a_block_that_is_used_twice_is_told(strategy: Strategy) -> None:
    if strategy.shards or strategy.world.size == 1:
        return
    for reentrant in (False, True):
        run, model = init(strategy), Repeated(reentrant)
        forward, _ = run.prepare(model, sgd(model))
        inputs = torch.ones(2, 4, device=run.device) + run.rank
        message = "completed the gradient of .* twice, .* use_reentrant=False"
        with pytest.raises(TrainerError, match=message) if reentrant else contextlib.nullcontext():
            run.backward(forward(inputs).sum())
        if not reentrant:
            assert len(set(strategy.all_gather_object(float(model.block.weight.grad.sum())))) == 1  # type: ignore[union-attr]
    # What that pass has begun to send is finished by the next one.
    run.backward(model.last(inputs).sum())
    strategy.barrier()


def check_parameters_of_any_type_equal_one_process(strategy: Strategy) -> None:
    if strategy.shards:
        return
    for dtype in (torch.complex64, torch.complex128, torch.bfloat16, torch.float16):
        run = init(strategy)
        model = nn.Module()
        model.weight = nn.Parameter(torch.full((3, 5), 0.5, dtype=dtype))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        run.prepare(model, optimizer)
        scale = torch.tensor(run.rank + 1.0, device=run.device).to(dtype) * (1j if dtype.is_complex else 1)
        product = model.weight * scale
        run.backward((product.abs().square() if dtype.is_complex else product.square()).sum().float())
        mean = sum((rank + 1.0) ** 2 for rank in range(run.world_size)) / run.world_size
        assert model.weight.grad is not None
        assert model.weight.grad.dtype == dtype
        assert model.weight.grad.real.float().cpu().flatten().tolist() == pytest.approx([mean] * 15, rel=1e-2)
        optimizer.step()
        assert_same_on_all_ranks(strategy, model)


def check_a_sweep_keeps_no_model(strategy: Strategy) -> None:
    """Not that of an earlier call either: the parameters are gone, without a garbage collection."""
    run, gone = init(strategy), list[Any]()
    gc.collect()
    gc.disable()
    try:
        for number in range(4):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
            model[1].requires_grad_(number % 2 == 0)  # frozen layers of an abandoned model stop no other
            forward, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters()))
            run.backward(forward(torch.ones(2, 4, device=run.device) * (run.rank + 1)).sum())
            optimizer.step()
            gone += [weakref.ref(model), weakref.ref(optimizer), *map(weakref.ref, model.parameters())]
            model[1].requires_grad_(True)
            del model, forward, optimizer
        assert [one() for one in gone] == [None] * len(gone) or strategy.shards
    finally:
        gc.enable()


def check_ranks_may_reach_two_models_in_any_order_or_one_of_them(strategy: Strategy) -> None:
    if strategy.shards:
        return
    run, first, second = init(strategy), nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    run.prepare(first, second, optimizer)
    ones = torch.ones(1, 2, device=run.device)
    ordered = (first, second) if run.rank % 2 else (second, first)
    run.backward(sum((1.0 if one is first else 100.0) * one(ones).sum() for one in ordered))
    assert first.weight.grad is not None
    assert second.weight.grad is not None
    assert first.weight.grad.tolist() == [[pytest.approx(1.0)] * 2]
    assert second.weight.grad.tolist() == [[pytest.approx(100.0)] * 2]
    optimizer.zero_grad()
    run.backward((first(ones) + (second(ones) if run.rank else 0)).sum())
    share = (run.world_size - 1) / run.world_size
    assert first.weight.grad.tolist() == [[pytest.approx(1.0)] * 2]
    assert (second.weight.grad is None) if share == 0 else second.weight.grad.tolist() == [[pytest.approx(share)] * 2]


def check_samples_of_one_model_leave_anothers_gradients_alone(strategy: Strategy) -> None:
    if strategy.shards:
        return
    run, first, second = init(strategy), nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    run.prepare(first, second)
    ones = torch.ones(1, 2, device=run.device)
    run.backward(first(ones).sum(), samples=3)
    with run.no_sync():
        run.backward(second(ones).sum(), samples=4)
    run.backward(second(ones).sum(), samples=4)
    for model in (first, second):
        assert model.weight.grad is not None
        assert model.weight.grad.tolist() == [[pytest.approx(1.0)] * 2]
    with run.no_sync():
        run.backward(second(ones).sum(), samples=4)
    with pytest.raises(TrainerError, match="begun on gradients of an earlier one; call zero_grad"):
        run.backward(second(ones).sum(), samples=4)


def drawn_ahead(loader: Any) -> Iterator[Any]:
    """Yield the loader's batches, two of which are drawn before the first is used."""
    batches = iter(loader)
    waiting = [*itertools.islice(batches, 2)]
    for batch in batches:
        waiting.append(batch)
        yield waiting.pop(0)
    yield from waiting


def check_batches_that_are_drawn_ahead_or_kept_count_what_they_are(strategy: Strategy) -> None:
    """The last batch has fewer samples than the others: two of them on rank 0, none elsewhere."""
    if strategy.shards:
        return
    data = make_data(3 * BATCH * strategy.world.size + 2)
    for kind in ("ahead", "cycle"):
        epochs = 1 if kind == "ahead" else 2
        expected = make_model()
        ours, plain = make_model(), sgd(expected)
        run = init(strategy)
        forward, optimizer = run.prepare(ours, sgd(ours))
        loader = run.loader(data, BATCH)
        steps = epochs * len(loader)
        batches = drawn_ahead(loader) if kind == "ahead" else itertools.islice(itertools.cycle(loader), steps)
        train_on(run, batches, forward, optimizer)
        for index in [*permutation(len(data), epoch=0, seed=0).split(BATCH * strategy.world.size)] * epochs:
            plain.zero_grad()
            F.cross_entropy(expected(data.inputs[index]), data.targets[index]).backward()
            plain.step()
        assert_equal(ours, expected, 1e-12)


def check_a_loss_of_two_loaders_batches_that_count_differently_is_told(strategy: Strategy) -> None:
    if strategy.world.size == 1 or strategy.shards:
        return
    run, model = init(strategy), make_model()
    forward, optimizer = run.prepare(model, sgd(model))
    long = run.loader(make_data(2 * BATCH * run.world_size), BATCH)
    short = run.loader(make_data(BATCH * run.world_size + 1), BATCH)
    told = None
    for one, other in zip(long, short, strict=True):
        loss = loss_of(forward, one) + loss_of(forward, other)
        try:
            run.backward(loss)
        except TrainerError as error:
            told = str(error)
            break
        optimizer.step()
        optimizer.zero_grad()
    assert told is not None
    assert "several batches of run.loader that count differently" in told
    strategy.barrier()


def check_samples_of_ones_own_count_what_is_said(strategy: Strategy) -> None:
    """Each rank has another number of samples in each of the two passes of an update, or none at all."""
    if strategy.shards:
        return
    world, model, expected = strategy.world, make_model(), make_model()
    run = init(strategy)
    forward, optimizer = run.prepare(model, sgd(model))
    plain = sgd(expected)
    for update in range(3):
        sizes = [(3 * rank + 2 * part + update) % 5 for rank in range(world.size) for part in range(2)]
        data = make_data(sum(sizes))
        pieces = [*zip(data.inputs.split(sizes), data.targets.split(sizes), strict=True)]
        for part, place in enumerate((2 * world.rank, 2 * world.rank + 1)):
            inputs, targets = (one.to(run.device) for one in pieces[place])
            with run.no_sync() if part == 0 else contextlib.nullcontext():
                run.backward(F.cross_entropy(forward(inputs), targets), samples=len(inputs))
        plain.zero_grad()
        F.cross_entropy(expected(data.inputs), data.targets).backward()
        for one in (optimizer, plain):
            one.step()
        optimizer.zero_grad()
    assert_equal(model, expected, 1e-12)


def check_a_mean_is_over_the_samples_of_all_ranks(strategy: Strategy) -> None:
    run = init(strategy)
    values = torch.arange(BATCH * run.world_size + 2, dtype=torch.float64)
    mean = run.mean()
    for (batch,) in run.loader(torch.utils.data.TensorDataset(values), BATCH):
        mean.add(batch.mean())
    resumed = run.mean()
    resumed.load_state_dict(mean.state_dict())
    assert resumed.read() == mean.read() == pytest.approx(float(values.mean()), rel=1e-12)
    mean.add(run.rank, samples=run.rank)
    expected = sum(rank * rank for rank in range(run.world_size)) / max(sum(range(run.world_size)), 1)
    assert run.world_size == 1 or mean.read() == pytest.approx(expected)


def check_a_mean_of_an_evaluation_weighs_its_batches(strategy: Strategy) -> None:
    """Also within an epoch of training, whose last batch is a padding batch on some ranks."""
    run = init(strategy)
    values = torch.arange(3 * BATCH * run.world_size + 1, dtype=torch.float64)
    model, optimizer = run.prepare(*(made := make_model(), sgd(made)))
    test = run.loader(torch.utils.data.TensorDataset(values), BATCH, training=False)
    train, losses = run.loader(make_data(BATCH * run.world_size + 1), BATCH), run.mean()
    for number, (inputs, targets) in enumerate(train):
        optimizer.zero_grad()
        run.backward(F.cross_entropy(model(inputs), targets))
        optimizer.step()
        mean = run.mean()
        for (batch,) in test:
            mean.add(batch.mean())
            if number == 0:  # an evaluation that is left early
                break
        assert number == 0 or mean.read() == pytest.approx(float(values.mean()), rel=1e-12)
        losses.add(run.batch_samples)  # again weighed by the training batch
    taken = run.world_size * BATCH
    assert losses.read() == pytest.approx((taken * BATCH + 1) / (taken + 1))


def check_a_collective_in_an_evaluation_that_ranks_leave_apart_is_refused(strategy: Strategy) -> None:
    run = init(strategy)
    uneven, even = (make_data(BATCH * run.world_size + more) for more in (BATCH // 2, 0))
    for inputs, _ in run.loader(even, BATCH, training=False):
        assert run.all_reduce(float(len(inputs)), "sum").item() == len(even)
    for inputs, _ in run.loader(uneven, BATCH, training=False):
        if run.world_size > 1:
            for call in (run.all_reduce, run.all_gather, run.broadcast, lambda _: run.barrier()):
                with pytest.raises(TrainerError, match="ranks have unequal numbers of batches; call it after the loop"):
                    call(float(len(inputs)))
    assert run.all_reduce(1.0, "sum").item() == run.world_size


def check_what_rank_0_saves_is_there_whole_or_not_at_all(strategy: Strategy) -> None:
    run = init(strategy)
    folder = run.broadcast(tempfile.mkdtemp() if run.is_root else None)
    path = Path(folder, "made", "weights.pt")
    run.save({"rank": run.rank}, path)
    if run.is_root:
        with pytest.raises(TrainerError, match=r"weights\.pt/below cannot be written: (Not a directory|File exists)"):
            run.save({}, path / "below")
    run.barrier()
    assert torch.load(path) == {"rank": 0}
    assert [*path.parent.iterdir()] == [path]
    run.barrier()
    if run.is_root:
        shutil.rmtree(folder)

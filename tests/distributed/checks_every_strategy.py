"""What every strategy has to do, run on every rank of one job; see `jobs`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.distributed.reference import assert_equal, fingerprint, make_data, make_model, sgd, tolerance, train_alone
from trainer import InMemory, Trainer, TrainerConfig, accuracy, init
from trainer.cluster.world import World
from trainer.models.sharded import gather
from trainer.strategies.base import Strategy
from trainer.strategies.single import SingleStrategy

BATCH = 4


def make_trainer(strategy: Strategy, model: nn.Module, optimizer: Any = sgd, **settings: Any) -> Trainer:
    defaults = {"batch_size": BATCH, "scale_lr": False, "decay": "none"}
    return Trainer(
        model, optimizer(model), F.cross_entropy, strategy=strategy, config=TrainerConfig(**{**defaults, **settings}),
        metrics={"accuracy": accuracy}, output=None, progress=False,
    )  # fmt: skip


def train_on(run: Any, batches: Iterable[Any], forward: Any, optimizer: torch.optim.Optimizer) -> None:
    """Train on batches, as most people write it."""
    for inputs, targets in batches:
        run.backward(F.cross_entropy(forward(inputs), targets))
        if run.sync_gradients:
            optimizer.step()
            optimizer.zero_grad()


def train_one(run: Any, forward: Any, optimizer: torch.optim.Optimizer, data: InMemory) -> None:
    """Train for an epoch."""
    loader = run.loader(data, BATCH)
    loader.seed = 0  # in the order that `train_alone` takes, which a second loader of the run has not
    for inputs, targets in loader:
        optimizer.zero_grad()
        run.backward(F.cross_entropy(forward(inputs), targets))
        optimizer.step()


def sample_counts(world_size: int) -> dict[str, int]:
    """Datasets that end evenly and unevenly, leave ranks empty, or are smaller than the world."""
    full = BATCH * world_size
    counts = {
        "one step": full,
        "twenty steps": 20 * full,
        "uneven last batch": 2 * full + world_size + 1,
        "all but one rank empty in the last step": 2 * full + 1,
        "smaller than the world": world_size - 1,
        "one sample": 1,
    }
    return {name: count for name, count in counts.items() if count > 0}


def assert_same_on_all_ranks(strategy: Strategy, model: nn.Module) -> None:
    assert len(set(strategy.all_gather_object(fingerprint(model)))) == 1, "ranks have different weights"


def assert_equal_everywhere(strategy: Strategy, model: nn.Module, expected: nn.Module, tolerance: float) -> None:
    assert_equal(model, expected, tolerance)
    assert_same_on_all_ranks(strategy, model)


def check_all_reduce_sums(strategy: Strategy) -> None:
    ranks = torch.arange(strategy.world.size, dtype=torch.float64)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        tensor = torch.full((3, 5), strategy.world.rank, dtype=dtype, device=strategy.world.device)
        reduced = strategy.all_reduce(tensor)
        assert torch.equal(tensor.cpu(), torch.full((3, 5), float(ranks.sum())).to(dtype))
        assert torch.equal(reduced, tensor)
        part = torch.full((4, 4), strategy.world.rank, dtype=dtype, device=strategy.world.device)
        for collective, expected in ((strategy.all_reduce, float(ranks.sum())), (strategy.broadcast, 0.0)):
            part.fill_(strategy.world.rank)
            collective(part[:, 1:3])
            assert part[:, 1:3].tolist() == [[expected] * 2] * 4
            assert part[:, ::3].tolist() == [[strategy.world.rank] * 2] * 4, "beside the slice"


def check_broadcast_brings_rank_0s_value(strategy: Strategy) -> None:
    tensor = torch.full((7,), float(strategy.world.rank) + 2, device=strategy.world.device)
    assert strategy.broadcast(tensor).tolist() == [2.0] * 7
    assert tensor.tolist() == [2.0] * 7
    last = strategy.world.size - 1
    assert strategy.broadcast_object({"rank": strategy.world.rank}, root=last) == {"rank": last}
    mixed = "a string" if strategy.world.is_root else None
    assert strategy.broadcast_object(mixed) == "a string"
    assert strategy.all_gather_object(mixed) == ["a string", *[None] * last]


def check_weights_equal_one_process(strategy: Strategy) -> None:
    for dtype in (torch.float64, torch.float32):
        for name, samples in sample_counts(strategy.world.size).items():
            model, data = make_model(dtype), make_data(samples, dtype)
            expected = train_alone(model, data, batch=BATCH * strategy.world.size)
            make_trainer(strategy, model).fit(data, epochs=1)
            try:
                assert_equal(model, expected, tolerance(dtype, strategy.world.device))
            except AssertionError as error:
                raise AssertionError(f"{name}, {dtype}: {error}") from None
            assert_same_on_all_ranks(strategy, model)


def check_clipping_sees_the_averaged_gradient(strategy: Strategy) -> None:
    model, data = make_model(), make_data(5 * BATCH * strategy.world.size + 1)
    expected = train_alone(model, data, batch=BATCH * strategy.world.size, clip_norm=0.05)
    make_trainer(strategy, model, clip_norm=0.05).fit(data, epochs=1)
    assert_equal(model, expected, 1e-12)


def check_global_batch_norm_equals_one_process(strategy: Strategy) -> None:
    # The last step leaves all ranks but one empty.
    model, data = make_model(batch_norm=True), make_data(3 * BATCH * strategy.world.size + 2)
    expected = train_alone(model, data, batch=BATCH * strategy.world.size)
    make_trainer(strategy, model, sync_batch_norm=True).fit(data, epochs=1)
    assert_equal_everywhere(strategy, model, expected, 1e-11)


def check_weights_and_optimizer_state_come_from_rank_0(strategy: Strategy) -> None:
    model = make_model(seed=strategy.world.rank)
    optimizer = sgd(model)
    F.cross_entropy(model(make_data(8).inputs), make_data(8).targets).backward()
    if strategy.world.is_root:
        optimizer.step()  # Only rank 0 has momentum, as after loading a checkpoint there,
        optimizer.param_groups[0]["lr"] = 0.25  # and the rate that a schedule had come to.
    momentum = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()] if optimizer.state else []
    momentum = strategy.broadcast_object(momentum)
    weights = strategy.broadcast_object([parameter.detach().clone() for parameter in model.parameters()])
    init(strategy).prepare(model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.25
    for parameter, expected in zip(model.parameters(), weights, strict=True):
        assert torch.equal(gather(parameter).cpu(), expected)
    assert_same_on_all_ranks(strategy, model)
    for parameter, expected in zip(model.parameters(), momentum, strict=True):
        assert torch.equal(gather(optimizer.state[parameter]["momentum_buffer"]).cpu(), expected)


def check_buffers_of_every_type_come_from_rank_0(strategy: Strategy) -> None:
    model = make_model()
    for dtype in (torch.bool, torch.bfloat16, torch.int64, torch.float64):
        values = torch.tensor([[strategy.world.rank == 0, True]] * 3).to(dtype).t()  # not contiguous
        model.register_buffer(f"of_{str(dtype).removeprefix('torch.')}", values)
    init(strategy).prepare(model, sgd(model))
    assert_same_on_all_ranks(strategy, model)
    assert bool(model.get_buffer("of_bool").all())


def check_evaluation_counts_every_sample_once(strategy: Strategy) -> None:
    for samples in (1, strategy.world.size + 1, 5 * BATCH * strategy.world.size + 3):
        model, data = make_model(), make_data(samples)
        found = make_trainer(strategy, model).evaluate(data)
        alone = make_trainer(SingleStrategy(World()), make_model()).evaluate(data)
        assert (found.evaluated, found.samples) == (samples, samples)
        assert abs(found.metrics["loss"] - alone.metrics["loss"]) < 1e-12
        assert found.metrics["accuracy"] == alone.metrics["accuracy"]


def check_rounding_variants_stay_close_to_full_precision(strategy: Strategy) -> None:
    data = make_data(6 * BATCH * strategy.world.size, torch.float32)
    variants = [("precision", "bf16"), ("precision", "fp16"), *(("compression", name) for name in rounding(strategy))]
    for accumulate, clip_norm in ((1, None), (2, 0.5)):
        batch = accumulate * BATCH * strategy.world.size
        exact = train_alone(make_model(torch.float32), data, batch=batch, clip_norm=clip_norm)
        for name, value in variants:
            model = make_model(torch.float32)
            settings = {"accumulate": accumulate, "clip_norm": clip_norm, name: value}
            make_trainer(strategy, model, **settings).fit(data, epochs=1)
            # The steps themselves move the weights by more than a tenth of their norm.
            assert_equal(model, exact, 5e-3)
            if strategy.world.size > 1 or name != "compression":  # a rank alone may send nothing
                with pytest.raises(AssertionError, match="differs by"):
                    assert_equal(model, exact, 1e-6)
            assert_same_on_all_ranks(strategy, model)


def rounding(strategy: Strategy) -> list[str]:
    """Return the compressions that send gradients as they are, in fewer digits."""
    return ["bf16"] if strategy.shards else ["bf16", "fp16"]


def check_a_mean_of_rounded_gradients_is_biased_to_neither_side(strategy: Strategy) -> None:
    """Among three ranks, a factor of 1/3 that is rounded to bf16 makes it 0.2 % too large."""
    size, generator = strategy.world.size, torch.Generator().manual_seed(0)
    gradients = 1 + torch.rand(size, 100, 100, generator=generator)  # of each rank
    for compression in rounding(strategy):
        run, model = init(strategy, compression=compression), nn.Linear(100, 100, bias=False)
        forward, _ = run.prepare(model, sgd(model))
        # The weights' gradient is the transposed product of the factors and the inputs.
        factors = gradients[strategy.world.rank].T.to(run.device)
        run.backward((forward(torch.eye(100, device=run.device)) * factors).sum())
        assert model.weight.grad is not None
        mean = gather(model.weight.grad).double().mean()
        assert float(mean) == pytest.approx(float(gradients.double().mean()), rel=5e-4)


def check_a_gradient_above_65504_is_infinite_in_fp16_and_not_in_bf16(strategy: Strategy) -> None:
    size = strategy.world.size
    for compression in rounding(strategy) if size > 1 else []:
        run, model = init(strategy, compression=compression, accumulate=2), nn.Linear(4, 1, bias=False)
        forward, _ = run.prepare(model, sgd(model))
        inputs = torch.linspace(0.5e6, 1.5e6, 2 * size).unsqueeze(1).expand(-1, 4).clone()
        for batch, _ in run.loader(InMemory(inputs, torch.zeros(2 * size)), 1):
            run.backward(forward(batch).mean())
        norm = run.clip_grad_norm_(model, 1.0)
        assert model.weight.grad is not None
        if compression == "fp16":
            assert not norm.isfinite()
        else:
            assert float(norm) == pytest.approx(2e6, rel=2**-7)
            assert gather(model.weight.grad).tolist() == [[pytest.approx(0.5, rel=2**-6)] * 4]

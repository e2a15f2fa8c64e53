"""What strategy "fsdp" does beside what every strategy does; run on every rank of one job."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.transformer import Block, Transformer
from tests.distributed.checks_every_strategy import BATCH, assert_equal_everywhere, train_one
from tests.distributed.reference import assert_equal, make_data, make_model, sgd, train_alone
from trainer import FsdpConfig, InMemory, init
from trainer.models.sharded import gather, is_sharded
from trainer.strategies.base import Strategy

WIDTH, LENGTH = 24, 8


def make_transformer(dtype: torch.dtype = torch.float64, *, seed: int = 1) -> Transformer:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Transformer(WIDTH, 3, 2, LENGTH).to(dtype)


def make_text(samples: int) -> InMemory:
    text = torch.randint(256, (samples, LENGTH), generator=torch.Generator().manual_seed(samples))
    return InMemory(text, text.roll(-1, 1))


def loss_of(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1).double(), targets.flatten())


def train_transformer(
    strategy: Strategy, make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """Return a model that was trained on all ranks, one that was trained alone on the same samples, the optimizer."""
    data = make_text(3 * BATCH * strategy.world.size)
    model, alone = make_transformer(dtype), make_transformer(dtype)
    run = init(strategy, **options)
    forward, optimizer = run.prepare(model, make(model.parameters()))
    by_hand = make(alone.parameters())
    for batch in data.inputs.split(BATCH * strategy.world.size):
        own = batch[run.rank * BATCH :][:BATCH]
        run.backward(loss_of(forward, own.to(run.device), own.roll(-1, 1).to(run.device)))
        loss_of(alone, batch, batch.roll(-1, 1)).backward()
        for one in (optimizer, by_hand):
            one.step()
            if batch.data_ptr() != data.inputs[-len(batch) :].data_ptr():  # the last step's gradients stay
                one.zero_grad()
    return model, alone, optimizer


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def local_bytes(tensors: Any) -> int:
    return sum((one.to_local() if is_sharded(one) else one).nbytes for one in tensors)


def check_each_rank_keeps_its_part_only(strategy: Strategy) -> None:
    """Of parameters, gradients and Adam's two moments; rows are divided, so a rank may have one more of each."""
    model, alone, optimizer = train_transformer(strategy, adamw)
    parameters = list(model.parameters())
    kinds: dict[str, Iterator[Tensor]] = {
        "parameters": iter(parameters),
        "gradients": (one.grad for one in parameters if one.grad is not None),
        "state": (value for one in parameters for value in optimizer.state[one].values() if value.dim()),
    }
    whole = sum(one.nbytes for one in alone.parameters())
    row = sum(one[:1].nbytes for one in alone.parameters())
    for kind, tensors in kinds.items():
        found, copies = strategy.all_gather_object(local_bytes(tensors)), 2 if kind == "state" else 1
        assert sum(found) == copies * whole, kind
        assert max(found) <= copies * (whole / strategy.world.size + row), kind


def check_parameters_that_were_replaced_keep_no_memory(strategy: Strategy) -> None:
    model = make_transformer()
    before = list(model.parameters())
    init(strategy).prepare(model)
    with torch._C.DisableTorchFunctionSubclass():  # else they tell of the sharded ones
        assert not any(one.numel() for one in before)


def check_options_change_memory_and_not_the_weights(strategy: Strategy) -> None:
    over = 2 if strategy.world.size % 2 == 0 else 1
    for settings in (
        {"blocks": ("Block",)},
        {"blocks": ()},
        {"checkpoint_activations": True},
        {"shard_over": over},
        {"shard_over": "host"},
    ):
        model, alone, _ = train_transformer(strategy, adamw, fsdp=FsdpConfig(**settings))
        assert_equal_everywhere(strategy, model, alone, 1e-11)
        if settings.get("shard_over") == over:
            whole = sum(one.nbytes for one in alone.parameters())
            assert (
                sum(strategy.all_gather_object(local_bytes(model.parameters()))) == strategy.world.size // over * whole
            )


def check_bfloat16_parameters_are_summed_in_float32(strategy: Strategy) -> None:
    exact, moved = make_transformer(torch.float32), {}
    for reduce in (None, "bf16"):
        settings = FsdpConfig(parameter_dtype="bf16", reduce_dtype=reduce)
        model, alone, _ = train_transformer(strategy, adamw, torch.float32, fsdp=settings)
        assert all(one.dtype == torch.float32 for one in model.parameters())
        assert_equal(model, alone, 2e-2)
        with pytest.raises(AssertionError, match="differs by"):
            assert_equal(model, alone, 1e-6)
        with pytest.raises(AssertionError, match="differs by"):
            assert_equal(model, exact, 2e-2)  # the steps themselves are larger
        grads = [gather(one.grad) for one in model.parameters() if one.grad is not None]
        moved[reduce] = torch.cat([one.flatten() for one in grads])
    # What was summed in bfloat16 has no more digits than that has.
    assert not torch.equal(moved[None], moved[None].bfloat16().float())
    if strategy.world.size in (2, 4):
        assert torch.equal(moved["bf16"], moved["bf16"].bfloat16().float())


def check_activations_of_checkpointed_blocks_are_computed_again(strategy: Strategy) -> None:
    calls: list[int] = []
    for again in (False, True):
        model = make_transformer()
        for block in model.blocks:
            assert isinstance(block, Block)
            block.qkv.register_forward_hook(lambda *_: calls.append(1))
        run = init(strategy, fsdp=FsdpConfig(checkpoint_activations=again))
        forward = run.prepare(model)
        text = make_text(2).inputs.to(run.device)
        calls.clear()
        run.backward(loss_of(forward, text, text))
        assert len(calls) == (6 if again else 3)


def check_torchs_optimizers_are_those_of_one_process(strategy: Strategy) -> None:
    kinds: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
        lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
        lambda p: torch.optim.Adagrad(p, lr=0.01),  # has its state before the first step
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
        lambda p: torch.optim.NAdam(p, lr=0.01),
        lambda p: torch.optim.RAdam(p, lr=0.01),
        lambda p: torch.optim.Adadelta(p),
        lambda p: torch.optim.Adamax(p),
        lambda p: torch.optim.ASGD(p),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    ]
    for kind in kinds:
        model, alone, optimizer = train_transformer(strategy, kind)
        try:
            assert_equal(model, alone, 1e-9)
        except AssertionError as error:
            raise AssertionError(f"{optimizer}: {error}") from None


def check_parameters_held_from_before_are_those_of_the_model(strategy: Strategy) -> None:
    """For clipping by the run and by PyTorch, an average of the weights, and an optimizer that is made afterwards."""
    clips: list[Callable[..., Tensor]] = [nn.utils.clip_grad_norm_, init(strategy).clip_grad_norm_]
    for clip in clips:
        model, data = make_model(), make_data(2 * BATCH * strategy.world.size)
        held = list(model.parameters())
        expected = train_alone(model, data, batch=BATCH * strategy.world.size, clip_norm=0.05)
        run = init(strategy)
        forward = run.prepare(model)
        optimizer = run.prepare(torch.optim.SGD(held, lr=0.1, momentum=0.9, weight_decay=0.01))
        average = [parameter.clone().detach() for parameter in held]
        for inputs, targets in run.loader(data, BATCH):
            optimizer.zero_grad()
            run.backward(F.cross_entropy(forward(inputs), targets))
            assert gather(clip(held, 0.05)) > 0.05
            optimizer.step()
            torch._foreach_lerp_(average, [parameter.data for parameter in held], 1.0)
        assert_equal(model, expected, 1e-12)
        pairs = zip(average, model.parameters(), strict=True)
        assert all(torch.equal(gather(one), gather(parameter)) for one, parameter in pairs)


def check_gradients_of_no_sync_are_dropped_by_zero_grad(strategy: Strategy) -> None:
    for to_none in (True, False):
        model, data = make_model(), make_data(BATCH * strategy.world.size)
        expected = train_alone(model, data, batch=BATCH * strategy.world.size)
        run = init(strategy)
        forward, optimizer = run.prepare(model, sgd(model))
        with run.no_sync():
            run.backward(forward(torch.ones(1, 1, 6, 6, dtype=torch.float64, device=run.device)).sum())
        optimizer.zero_grad(set_to_none=to_none)
        train_one(run, forward, optimizer, data)
        assert_equal(model, expected, 1e-12)


def check_a_rank_without_samples_follows_the_others_passes(strategy: Strategy) -> None:
    """Passes of two models in turns, one of which is called twice, and of none that the evaluation does not call."""
    generator, critic, unused = (nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double() for _ in range(3))
    critic.requires_grad_(False)
    run = init(strategy)
    generator, critic, unused = run.prepare(generator, critic, unused)
    samples = strategy.world.size + 1  # the last step has one rank's
    data = InMemory(torch.randn(samples, 6, generator=torch.Generator().manual_seed(1)).double(), torch.zeros(samples))
    for _ in range(2):
        total = torch.zeros((), dtype=torch.float64, device=run.device)
        with torch.no_grad():
            for inputs, _ in run.loader(data, 1, training=False):
                total += critic(generator(critic(inputs))).sum()
        whole = torch.stack(run.all_gather(total.cpu())).sum()
        with torch.no_grad():  # by every rank, after the evaluation
            assert torch.allclose(whole, critic(generator(critic(data.inputs.to(run.device)))).sum().cpu())


def check_a_whole_state_is_plain_pytorchs(strategy: Strategy) -> None:
    model, alone, _ = train_transformer(strategy, adamw)
    run = init(strategy)
    state = run.state_dict(run.prepare(model))
    assert bool(state) == run.is_root
    if run.is_root:
        plain = make_transformer(seed=3)
        plain.load_state_dict(copy.deepcopy(state))
        assert_equal(plain, alone, 1e-11)

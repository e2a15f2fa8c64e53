"""What strategy "fsdp" refuses, in one line; run on every rank of one job."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.checks_fsdp import make_transformer
from tests.distributed.reference import make_model, sgd
from trainer import ConfigError, FsdpConfig, TrainerError, init
from trainer.strategies.base import Strategy


def check_optimizers_that_need_whole_parameters_are_refused(strategy: Strategy) -> None:
    kinds: list[Any] = [torch.optim.LBFGS, torch.optim.Rprop, torch.optim.Adafactor]
    fused = [partial(kind, fused=True) for kind in (torch.optim.SGD, torch.optim.Adagrad)]
    for kind in (*kinds, *fused):
        model = make_model()
        optimizer = kind(model.parameters(), lr=0.1)
        told = f"^{type(optimizer).__name__}{r'.fused=True.' * (kind in fused)} does not work on sharded parameters"
        with pytest.raises(ConfigError, match=told):
            init(strategy).prepare(model, optimizer)


def check_a_step_on_gradients_of_no_sync_is_refused(strategy: Strategy) -> None:
    model = make_model()
    run = init(strategy)
    forward, optimizer = run.prepare(model, sgd(model))
    with run.no_sync():
        run.backward(forward(torch.ones(1, 1, 6, 6, dtype=torch.float64, device=run.device)).sum())
    with pytest.raises(TrainerError, match="leave no_sync for the last one"):
        optimizer.step()


def check_a_loss_on_parameters_from_before_is_refused(strategy: Strategy) -> None:
    model = nn.Linear(2, 2)
    held = list(model.parameters())
    run = init(strategy)
    forward, _ = run.prepare(model, sgd(model))
    with pytest.raises(TrainerError, match=r"the loss holds weight as it was before run.prepare"):
        forward(torch.ones(1, 2, device=run.device)).sum() + sum(one.square().sum() for one in held)
    model = nn.Linear(2, 2).to(run.device)
    loss = model(torch.ones(1, 2, device=run.device)).sum()
    run.prepare(model)
    with pytest.raises(TrainerError, match=r"the loss holds .* as it was before run.prepare"):
        run.backward(loss)


class Experts(nn.Module):
    """Calls those of its experts that it is told to."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(2, width), nn.Linear(width, 2)) for width in widths)

    def forward(self, inputs: torch.Tensor, called: tuple[int, ...]) -> torch.Tensor:
        return sum((self.experts[number](inputs) for number in called), inputs)


def check_ranks_that_call_different_blocks_are_told(strategy: Strategy) -> None:
    """Experts of one shape would be gathered half from each rank; others, or another number, would end in a hang."""
    rank = strategy.world.rank
    for widths, called, told in (
        ((3, 3), (rank % 2,), r"^rank 0 calls experts\.0\.0 where rank 1 calls experts\.1\.0, and under"),
        ((3, 4), (rank % 2,), r"^rank 0 calls experts\.0\.0 where rank 1 calls experts\.1\.0"),
        ((3, 3), (0, 1)[: 1 + rank % 2], r"^rank 0 calls another collective where rank 1 calls experts\.1\.0"),
    ):
        run = init(strategy)
        forward = run.prepare(Experts(widths))
        with torch.no_grad(), pytest.raises(TrainerError, match=told):
            run.all_reduce(forward(torch.ones(1, 2, device=run.device), called))


def check_what_cannot_be_sharded_is_refused(strategy: Strategy) -> None:
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    scalar = nn.Linear(2, 2)
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    mixed = nn.Sequential(nn.Linear(2, 2).double(), nn.ReLU(), nn.LayerNorm(2))
    rows = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    models: list[tuple[nn.Module, dict[str, Any], str]] = [
        (tied, {}, r"parameter weight of 1 is one of 0 as well"),
        (scalar, {}, r"parameter scale is a scalar"),
        (mixed, {}, r"are float32 and float64; a block's have one type"),
        (rows, {}, r"parameter weight is not contiguous"),
        (nn.Linear(2, 2, device="meta"), {}, r"parameter weight is on the meta device"),
        (make_model(), {"compression": "fp16"}, r"compression is 'fp16', which strategy 'fsdp' does not have"),
        (make_model(), {"sync_every": 4}, r"sync_every is 4, and under FSDP no rank has whole gradients"),
        (
            make_model(),
            {"fsdp": FsdpConfig(blocks=("Attention",))},
            r"blocks has 'Attention'; valid are .*, Linear, Tanh",
        ),
        (make_transformer(), {"fsdp": FsdpConfig(blocks=("ModuleList",))}, r"'ModuleList', which has no forward"),
        (make_model(), {"fsdp": FsdpConfig(shard_over=5)}, r"shard_over is 5, and there are \d ranks"),
        (nn.Linear(2, 2), {"fsdp": FsdpConfig(checkpoint_activations=True)}, r"and there are none; name blocks"),
    ]
    if strategy.world.device.type == "cpu":
        models.append((make_model(), {"fsdp": FsdpConfig(cpu_offload=True)}, r"and the device is the CPU"))
    for model, settings, told in models:
        with pytest.raises(ConfigError, match=told):
            init(strategy, **settings).prepare(model)


def check_other_settings_for_a_sharded_model_are_refused(strategy: Strategy) -> None:
    model = make_transformer()
    init(strategy).prepare(model)
    with pytest.raises(ConfigError, match="was sharded before, by fully_shard or with other settings"):
        init(strategy, fsdp=FsdpConfig(blocks=())).prepare(model)

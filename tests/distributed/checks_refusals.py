"""What the job's launcher cannot serve is refused, on every rank; `jobs` says which check belongs to which job."""

from __future__ import annotations

import pytest

from examples.strategies import STRATEGIES
from trainer import ConfigError
from trainer.strategies import make_strategy
from trainer.strategies.base import Strategy


def check_a_ring_is_refused_without_mpi(strategy: Strategy) -> None:
    launcher = {"horovodrun": "horovodrun --gloo"}.get(strategy.world.launcher, strategy.world.launcher)
    with pytest.raises(
        ConfigError, match=rf"^strategy 'ring' needs MPI, and {launcher} started .*start with `horovodrun --mpi`"
    ):
        make_strategy(STRATEGIES["ring"], strategy.world)


def check_single_is_refused_among_several_ranks(strategy: Strategy) -> None:
    with pytest.raises(ConfigError, match=f"strategy 'single' trains alone, but {strategy.world.launcher} started"):
        make_strategy("single", strategy.world)


def check_horovod_is_refused_under_torchrun(strategy: Strategy) -> None:
    with pytest.raises(ConfigError, match="strategy 'horovod' cannot join the ranks that torchrun started"):
        make_strategy("horovod", strategy.world)

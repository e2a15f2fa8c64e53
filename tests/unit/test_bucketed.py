"""Gradients in buckets: what is sent, in which order, and what comes back. The all-reduce is the tests' own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.strategies.summing import SummingStrategy
from tests.unit.ranks_as_threads import Threads
from trainer import TrainerError, World
from trainer.config import RunConfig
from trainer.strategies import buckets
from trainer.strategies.base import Strategy
from trainer.strategies.buckets import BucketSynchronizer
from trainer.strategies.compress.power_sgd import PowerSGDSynchronizer
from trainer.strategies.compress.whole_gradients import WholeSynchronizer
from trainer.strategies.gradients import GradientSynchronizer, is_shared


def parameters(*sizes: int, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def named(held: Sequence[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{number}", parameter) for number, parameter in enumerate(held)]


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 4 * 8)


def start(
    held: Sequence[nn.Parameter], all_reduce: Callable[[Tensor], object], wire_type: torch.dtype | None = None
) -> BucketSynchronizer:
    """One of two ranks, whose other one has a gradient of each parameter: what `all_reduce` adds."""

    def begin(flat: Tensor, name: str) -> Callable[[], object]:
        (bucket,) = (bucket for bucket in synchronizer.buckets if bucket.flat is flat)
        gradients, has_gradient = flat.tensor_split([len(flat) - len(bucket.means)])
        all_reduce(gradients)
        has_gradient.add_(1.0)
        return lambda: None

    ranks: Any = SimpleNamespace(start_gradients=begin, world=World(size=2))
    synchronizer = BucketSynchronizer(named(held), ranks, wire_type)
    return synchronizer


def backward(*pairs: tuple[nn.Parameter, float | Tensor]) -> None:
    torch.stack([(parameter * slope).sum() for parameter, slope in pairs]).sum().backward()


@contextmanager
def one_pass(synchronizer: GradientSynchronizer) -> Iterator[None]:
    """A backward pass that closes an update, as `Updates` does it."""
    synchronizer.before_backward()
    yield
    synchronizer.after_backward()
    synchronizer.complete()


def values(parameter: nn.Parameter) -> list[float] | None:
    return None if parameter.grad is None else parameter.grad.tolist()


@pytest.mark.usefixtures("small_buckets")
def test_a_full_bucket_leaves_before_the_backward_pass_is_over_and_the_others_at_its_end() -> None:
    sent: list[int] = []
    held = parameters(4, 5, 6)
    with one_pass(start(held, lambda flat: sent.append(flat.numel()))):
        backward((held[2], 1.0))
        assert sent == [6]
        backward((held[0], 1.0))
        assert sent == [6]
    assert sent == [6, 5, 4]


class Two(SummingStrategy):
    """Rank 0 of two, whose other one has what `other` adds."""

    def __init__(self, other: Callable[[Tensor], object], overlaps: bool) -> None:
        super().__init__(World(size=2, local_size=2, launcher="mpirun"))
        self._other, self.may_overlap = other, overlaps

    def sum_gradients(self, flat: Tensor) -> None:
        self._other(flat)

    def sum_values(self, flat: Tensor) -> None:
        return

    def synchronizer(self, held: Sequence[nn.Parameter]) -> GradientSynchronizer:
        made = self.prepare(nn.Module(), named(held), RunConfig())
        assert isinstance(made, GradientSynchronizer)
        return made


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("overlaps", [False, True])
def test_buckets_leave_in_one_order_whatever_order_their_gradients_came_in(overlaps: bool) -> None:
    sent: list[tuple[float, bool]] = []
    here, held = threading.get_ident(), parameters(4, 5, 6)
    strategy = Two(lambda flat: sent.append((float(flat[0]), threading.get_ident() != here)), overlaps)
    with one_pass(strategy.synchronizer(held)):
        for slope, parameter in enumerate(held):  # the first one's bucket is the last to leave
            backward((parameter, 2.0 * slope))
    strategy.close()
    assert sent == [(slope, overlaps) for slope in (2.0, 1.0, 0.0)]


@pytest.mark.usefixtures("small_buckets")
def test_what_goes_wrong_in_the_background_is_raised_where_one_waits() -> None:
    def fail(flat: Tensor) -> None:
        raise TrainerError("the network is down")

    held, strategy = parameters(4, 5), Two(fail, overlaps=True)
    synchronizer = strategy.synchronizer(held)
    synchronizer.before_backward()
    backward((held[0], 1.0), (held[1], 1.0))
    synchronizer.after_backward()
    with pytest.raises(TrainerError, match="the network is down"):
        synchronizer.complete()
    strategy.close()


KINDS: dict[str, Callable[[Sequence[nn.Parameter], Strategy], GradientSynchronizer]] = {
    "buckets": lambda held, strategy: BucketSynchronizer(named(held), strategy),
    "whole": lambda held, strategy: WholeSynchronizer(named(held), strategy),
    "powersgd": lambda held, strategy: PowerSGDSynchronizer(named(held), strategy, rank=9, least_saving=0.0),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


@every_kind
def test_who_has_no_gradient_gets_the_others_mean_and_none_where_no_rank_has_one(
    make: Callable[..., GradientSynchronizer],
) -> None:
    def job(rank: int, strategy: Strategy) -> list[list[list[float] | None]]:
        held = [nn.Parameter(torch.zeros(2, 2, dtype=torch.float64)) for _ in range(3)]
        synchronizer, by_pass = make(held, strategy), []
        for reached in ((0, 1), (1, 0)):  # by rank; nobody reaches the third one
            for parameter in held:
                parameter.grad = None
            with one_pass(synchronizer):
                backward((held[reached[rank]], torch.tensor([[2.0, 0.0], [0.0, 4.0]])))
            by_pass.append([values(parameter) for parameter in held])
        return by_pass

    mean = pytest.approx(torch.tensor([[1.0, 0.0], [0.0, 2.0]]).numpy())
    for by_pass in Threads(2).run(job):
        for first, second, third in by_pass:
            assert first == mean
            assert second == mean
            assert third is None


@every_kind
@pytest.mark.parametrize("slopes", [(0.0, None), (2.0, -2.0, None)], ids=["zeros", "zeros in total"])
def test_a_gradient_of_zeros_is_one_on_all_ranks(
    make: Callable[..., GradientSynchronizer], slopes: tuple[float | None, ...]
) -> None:
    """Weight decay and momentum move a parameter that has one, and none that has none."""

    def job(rank: int, strategy: Strategy) -> Tensor | None:
        held = [nn.Parameter(torch.zeros(2, 2, dtype=torch.float64)) for _ in range(2)]
        slope = slopes[rank]
        with one_pass(make(held, strategy)):
            backward((held[0], 1.0), *([(held[1], slope)] if slope is not None else []))
        return held[1].grad

    for gradient in Threads(len(slopes)).run(job):
        assert gradient is not None
        assert not gradient.any()


@every_kind
def test_a_rank_without_a_backward_pass_gets_the_others_mean(make: Callable[..., GradientSynchronizer]) -> None:
    def job(rank: int, strategy: Strategy) -> list[list[float] | None]:
        held = [nn.Parameter(torch.zeros(2, 2, dtype=torch.float64)) for _ in range(2)]
        synchronizer = make(held, strategy)
        if rank == 0:
            synchronizer.before_backward()
            backward((held[0], 4.0))
            synchronizer.after_backward()
        synchronizer.complete()
        return [values(parameter) for parameter in held]

    for first, second in Threads(2).run(job):
        assert first == pytest.approx(torch.full((2, 2), 2.0).numpy())
        assert second is None


@pytest.mark.usefixtures("small_buckets")
def test_a_pass_that_has_failed_sends_what_other_ranks_wait_for_and_leaves_nothing_to_the_next() -> None:
    sent: list[list[float]] = []
    held = parameters(4, 5)
    synchronizer = start(held, lambda flat: sent.append(flat.tolist()))
    synchronizer.before_backward()
    backward((held[1], 2.0))  # and an error, which the script catches
    for parameter in held:
        parameter.grad = None
    synchronizer.after_backward()
    synchronizer.reduce_after_error()
    with one_pass(synchronizer):
        backward((held[0], 8.0), (held[1], 6.0))
    assert sent == [[1.0] * 5, [0.0] * 4, [3.0] * 5, [4.0] * 4]
    assert [values(parameter) for parameter in held] == [[4.0] * 4, [3.0] * 5]


def test_a_gradient_shares_memory_where_autograd_gives_a_view_of_another() -> None:
    layer, position = nn.Linear(2, 3), nn.Parameter(torch.zeros(4, 3))
    seen: dict[Tensor, bool] = {}
    for parameter in (*layer.parameters(), position):
        parameter.register_post_accumulate_grad_hook(lambda one: seen.update({one: is_shared(one.grad)}))
    (layer(torch.ones(1, 4, 2)) + position.unsqueeze(0)).square().sum().backward()
    assert seen == {layer.weight: False, layer.bias: False, position: True}

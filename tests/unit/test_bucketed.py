"""Gradients in buckets: what is sent, in which order, and what comes back. The all-reduce is the tests' own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from trainer import TrainerError
from trainer.strategies import buckets
from trainer.strategies.bucketed import BucketReducer
from trainer.strategies.buckets import make_buckets


def parameters(*sizes: int, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 4 * 8)


def start(
    held: list[nn.Parameter], all_reduce: Callable[[Tensor], object], executor: ThreadPoolExecutor | None = None
) -> BucketReducer:
    """One of two ranks, whose other one has what `all_reduce` adds."""
    return BucketReducer(
        make_buckets(held), lambda flat: (all_reduce(flat), None)[1], scale=0.5, executor=lambda: executor
    )


def backward(*pairs: tuple[nn.Parameter, float]) -> None:
    torch.stack([(parameter * slope).sum() for parameter, slope in pairs]).sum().backward()


@pytest.mark.usefixtures("small_buckets")
def test_buckets_are_cut_in_reverse_and_by_type() -> None:
    doubles, floats = parameters(3, 2, 2, 5), parameters(7, dtype=torch.float32)
    found = make_buckets([*doubles, *floats])
    assert [[p.numel() for p in bucket.places] for bucket in found] == [[7], [5], [2, 2], [3]]
    assert [bucket.flat.dtype for bucket in found] == [torch.float32, *[torch.float64] * 3]
    assert [bucket.flat.numel() for bucket in found] == [7, 5, 4, 3]


def test_gradients_that_come_back_have_the_weights_order_in_memory() -> None:
    first = nn.Parameter(torch.zeros(2, 3, 2, 2).contiguous(memory_format=torch.channels_last))
    second = nn.Parameter(torch.zeros(5, 2).t())
    exchange = start([first, second], lambda flat: flat)
    values = [torch.arange(float(one.numel())).view(one.shape) for one in (first, second)]
    torch.stack([(one * value).sum() for one, value in zip((first, second), values, strict=True)]).sum().backward()
    exchange.finish()
    for one, value in zip((first, second), values, strict=True):
        assert one.grad is not None
        assert one.grad.stride() == one.stride()
        assert torch.equal(one.grad, value / 2)


def test_a_smaller_wire_type_is_taken_and_a_larger_one_is_not() -> None:
    (narrow,) = make_buckets(parameters(2), torch.float16)
    assert narrow.flat.dtype == torch.float16
    (kept,) = make_buckets(parameters(2, dtype=torch.bfloat16), torch.float16)
    assert kept.flat.dtype == torch.bfloat16


def test_gradients_become_the_mean() -> None:
    held = parameters(3, 2)
    exchange = start(held, lambda flat: flat.add_(1.0))
    backward((held[0], 4.0), (held[1], 6.0))
    exchange.finish()
    assert held[0].grad is not None
    assert held[1].grad is not None
    assert held[0].grad.tolist() == [3.0] * 3
    assert held[1].grad.tolist() == [4.0] * 2


def test_what_comes_back_has_the_parameters_type() -> None:
    (held,) = parameters(2, dtype=torch.float32)
    exchange = BucketReducer(make_buckets([held], torch.float16), lambda flat: None, scale=0.5, executor=lambda: None)
    backward((held, 1 / 3))
    exchange.finish()
    assert held.grad is not None
    assert held.grad.dtype == torch.float32
    assert held.grad.tolist() == (torch.tensor([1 / 6] * 2).half().float()).tolist()


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("background", [False, True])
def test_buckets_leave_in_one_order_whatever_order_their_gradients_came_in(background: bool) -> None:
    sent: list[int] = []
    held = parameters(4, 5, 6)
    with ThreadPoolExecutor(1) as executor:
        exchange = start(held, lambda flat: sent.append(flat.numel()), executor if background else None)
        for parameter in held:  # the first one's bucket is the last to leave
            backward((parameter, 1.0))
        exchange.finish()
    assert sent == [6, 5, 4]


@pytest.mark.usefixtures("small_buckets")
def test_a_full_bucket_leaves_before_the_backward_pass_is_over() -> None:
    sent: list[int] = []
    held = parameters(4, 5)
    exchange = start(held, lambda flat: sent.append(flat.numel()))
    backward((held[1], 1.0))
    assert sent == [5]
    backward((held[0], 1.0))
    exchange.finish()
    assert sent == [5, 4]


def test_a_parameter_without_a_gradient_counts_as_zero_and_gets_the_others_share() -> None:
    held = parameters(2, 1)
    exchange = start(held, lambda flat: flat.add_(0.25))
    backward((held[0], 1.0))
    exchange.finish()
    assert held[1].grad is not None
    assert held[1].grad.tolist() == [0.25]


def test_gradients_stay_here_while_paused_and_are_sent_with_the_next_ones() -> None:
    sent: list[Tensor] = []
    (held,) = parameters(1)
    exchange = start([held], lambda flat: sent.append(flat.clone()))
    exchange.paused = True
    backward((held, 2.0))
    assert not sent
    exchange.paused = False
    backward((held, 4.0))
    exchange.finish()
    assert [flat.tolist() for flat in sent] == [[3.0]]


def test_finishing_twice_exchanges_once_and_reopening_exchanges_again() -> None:
    sent: list[Tensor] = []
    (held,) = parameters(1)
    exchange = start([held], sent.append)
    for _ in range(2):
        backward((held, 2.0))
        exchange.finish()
        exchange.finish()
        exchange.reopen()
        held.grad = None
    assert len(sent) == 2


def test_a_second_backward_pass_whose_gradients_are_on_their_way_is_refused() -> None:
    (held,) = parameters(1)
    exchange = start([held], lambda flat: None)
    backward((held, 1.0))
    assert exchange.is_sending
    with pytest.raises(TrainerError, match=r"second backward pass came before optimizer.step\(\)"):
        backward((held, 1.0))


def test_a_backward_pass_may_add_to_what_has_been_exchanged() -> None:
    """As after a step that a GradScaler skipped. The other rank has the same gradients."""
    (held,) = parameters(1)
    exchange = start([held], lambda flat: flat.mul_(2.0))
    for expected in ([1.0], [2.0]):
        backward((held, 1.0))
        exchange.finish()
        assert held.grad is not None
        assert held.grad.tolist() == expected


@pytest.mark.usefixtures("small_buckets")
def test_what_goes_wrong_in_the_background_is_raised_where_one_waits() -> None:
    def fail(flat: Tensor) -> None:
        raise TrainerError("the network is down")

    held = parameters(4, 5)
    with ThreadPoolExecutor(1) as executor:
        exchange = start(held, fail, executor)
        backward((held[0], 1.0), (held[1], 1.0))
        with pytest.raises(TrainerError, match="the network is down"):
            exchange.finish()


def test_a_parameter_that_is_prepared_again_is_watched_once() -> None:
    sent: list[Tensor] = []
    (held,) = parameters(1)
    first, second = (start([held], lambda flat: sent.append(flat.clone())) for _ in range(2))
    first.remove_hooks()
    for _ in range(2):
        held.grad = None
        backward((held, 2.0))
        second.finish()
        second.reopen()
    assert [flat.tolist() for flat in sent] == [[1.0], [1.0]]

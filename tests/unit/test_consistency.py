"""The consistency check: ranks that would train different things all get one error, with names and values."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import Dataset, Subset

from tests.unit.ranks_as_threads import Threads
from trainer import ConfigError, InMemory, TrainerError, World
from trainer.data.loader import ShardedLoader
from trainer.loop.consistency import (
    PeriodicCheck,
    _digest,
    check_consistency,
    check_devices,
    check_states,
    describe_model,
    warn_of_other_data,
)
from trainer.loop.random_numbers import random_state
from trainer.strategies.base import Strategy
from trainer.strategies.single import SingleStrategy

View = tuple[Any, ...]


class Gathered(SingleStrategy):
    """A rank to whom the others' views are given by the test: (host, facts) or (host, GPU, may share)."""

    def __init__(self, *others: Any, rank: int = 0, device: str = "cpu") -> None:
        self.world = World(rank=rank, size=len(others) + 1, device=torch.device(device))
        self._others = list(others)
        self.asked = self.sent = 0

    def all_gather_object(self, value: Any) -> list[Any]:
        self.asked += 1
        self.sent = len(str(value))
        others = [_digest(view[1]) for view in self._others] if isinstance(value, str) else self._others
        return [*others[: self.world.rank], value, *others[self.world.rank :]]


@pytest.fixture(autouse=True)
def _on_host_a(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.loop.consistency.socket.gethostname", lambda: "a")


def test_equal_facts_are_gathered_once_and_raise_nothing() -> None:
    seen = {"epochs": "3", "samples": "[60, 10]", "a long one": "x" * 1000}
    rank = Gathered(("a", seen), ("b", seen))
    check_consistency(rank, {"epochs": 3, "samples": [60, 10], "a long one": "x" * 1000})
    assert (rank.asked, rank.sent) == (1, 64), "their hash alone"


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        ({"parameter bias": "float32[3]"}, {}, "about parameter bias: .* has float32.3., .* has none"),
        ({}, {"parameter bias": "float32[3]"}, "about parameter bias: .* has none, .* has float32.3."),
    ],
)
def test_a_fact_that_only_one_rank_has_is_a_difference(
    ours: dict[str, object], theirs: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_consistency(Gathered(("b", theirs)), ours)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: nn.LazyLinear(2), "parameter 0.weight"),
        (lambda: nn.LazyBatchNorm1d(affine=False), "buffer 0.running_mean"),
    ],
)
def test_a_lazy_module_is_refused_until_it_has_shapes(make: Callable[[], nn.Module], name: str) -> None:
    model = nn.Sequential(make())
    with pytest.raises(ConfigError, match=f"^{name} is of a lazy module .* run one forward pass on a sample input"):
        describe_model(model)
    model(torch.ones(2, 3))
    assert str(describe_model(model)[name]).endswith("3]")


def test_a_stride_without_a_meaning_is_no_difference() -> None:
    layers = [nn.Conv2d(2, 3, (1, 2)).to(memory_format=torch.channels_last) for _ in range(2)]
    layers[1].weight.data = layers[1].weight.data.as_strided((3, 2, 1, 2), (4, 1, 99, 2))
    assert layers[0].weight.stride() != layers[1].weight.stride()
    assert describe_model(layers[0]) == describe_model(layers[1])


class Items(Dataset[Any]):
    """Items; drawn with noise from the global generators, all noise from a generator of its own, or a mistake."""

    def __init__(self, items: Sequence[Any], noise: str = "") -> None:
        self.targets, self._noise, self.generator = items, noise, np.random.default_rng()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        if self._noise == "own":
            return self.generator.random()
        noise = [random.random(), np.random.rand(), torch.rand(2)] if self._noise else []
        return {"item": self.targets[index if self._noise != "mistake" else -9], "noise": noise}


OTHER_DATA: dict[str, tuple[Callable[[int], Any], str]] = {
    "the same": (lambda rank: Items([*range(99)]), ""),
    "drawn by each rank": (lambda rank: InMemory(torch.full((9, 2), float(rank)), torch.zeros(9)), "item 0"),
    "labels in another order": (lambda rank: [(torch.ones(2), "ab"[:: 1 - 2 * rank].index(x)) for x in "ab"], "item 0"),
    "one item": (lambda rank: [SimpleNamespace(x=np.arange(3), y=[None, rank * (n == 7)]) for n in range(9)], "item 7"),
    "with noise, the same": (lambda rank: Items([*"abcd"], "global"), ""),
    "with noise": (lambda rank: Items([*"abc", f"d{rank}"], "global"), "item 3"),
    "all noise, the same": (lambda rank: Subset(Items([*"abcd"], "own"), [0, 2]), ""),
    "all noise": (lambda rank: Subset(Items([*"abcd"][:: 1 - 2 * rank], "own"), [0, 2]), "targets"),
    "a mistake": (lambda rank: Items([*"abcd"], "own" if rank else "mistake"), ""),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", OTHER_DATA)
def test_data_that_differ_between_ranks_are_told(name: str, workers: int, capsys: pytest.CaptureFixture[str]) -> None:
    make, told = OTHER_DATA[name]
    datasets = [make(rank) for rank in range(2)]
    options: Any = {} if isinstance(datasets[0], InMemory) else {"num_workers": workers}
    here, there = (
        ShardedLoader(data, 1, world=World(rank=rank, size=2), **options) for rank, data in enumerate(datasets)
    )
    other = Gathered(there.digests())
    before = str(random_state(torch.device("cpu")))
    warn_of_other_data(other, here)
    assert str(random_state(torch.device("cpu"))) == before
    said = capsys.readouterr().err
    assert f"trainer: WARNING: {told}" in said and "not the same on ranks 0 and 1" in said if told else not said


def small(kind: Callable[..., nn.Module] = nn.Linear, size: int = 3) -> nn.Module:
    return kind(2, size)


def test_ranks_that_share_a_gpu_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-1"))
    check_devices(Gathered(("a", "GPU-0", False), ("b", None, False), device="cuda:0"))
    with pytest.raises(ConfigError, match=r"^ranks 0 and 2 share one GPU of host a; start at most as many"):
        check_devices(Gathered(("a", "GPU-0", False), ("a", "GPU-1", False), device="cuda:0"))


def compare(ranks: int, job: Callable[[int, PeriodicCheck], None]) -> list[Exception | None]:
    """Return what the job raises on each rank."""

    def caught(rank: int, strategy: Strategy) -> Exception | None:
        try:
            job(rank, PeriodicCheck(strategy))
        except Exception as error:
            return error
        return None

    return Threads(ranks).run(caught)


def one_error(errors: list[Exception | None], kind: type[Exception]) -> str:
    """Return the message, which is the same on all ranks."""
    assert {type(error) for error in errors} == {kind}
    (message,) = set(map(str, errors))
    return message


def when_due(check: PeriodicCheck, position: Any, optimizers: list[Any], models: list[Any], passes: int = 1) -> None:
    if passes > check.due_after:
        check.compare(passes, position, dict(enumerate(optimizers)), dict(enumerate(models)))


def test_ranks_are_compared_often_at_first_and_then_every_1024_backward_passes() -> None:
    rank, due = Gathered(("a", (0, 0, 2), set(), set())), []
    check = PeriodicCheck(rank)
    for number in range(4000):
        try:
            when_due(check, (0, 0, 1), [], [], number + 1)
        except TrainerError:
            due.append(number)
    assert due == [0, *(2**power for power in range(11)), 2048, 3072]
    assert rank.asked == len(due)


def test_a_loader_or_an_epoch_that_one_rank_alone_has_begun_is_named() -> None:
    for here, there in (((0, 0, 7), (1, 0, 7)), ((0, 0, 7), (0, 1, 7)), ((0, 0, 7), None)):
        errors = compare(2, lambda rank, check: when_due(check, (here, there)[rank], [], []))  # noqa: B023
        assert "rank 1 on host a" in one_error(errors, TrainerError)
    assert "has drawn none of run.loader" in str(errors[0])


TYPES = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}
"""With integers of their size."""
NAMED = {f"in_{str(one).removeprefix('torch.')}": one for one in (*TYPES, torch.complex64)}


def of_all_types() -> nn.ParameterDict:
    """The same weights on all ranks, also such that are no numbers, and none in the order of memory."""
    generator = torch.Generator().manual_seed(3)
    drawn = {name: torch.randn(4, 3, generator=generator).to(one) for name, one in NAMED.items()}
    drawn["in_float32"][0] = torch.nan
    return nn.ParameterDict({name: nn.Parameter(one.t()) for name, one in drawn.items()})


def flip(parameter: Tensor, bit: int) -> None:
    """Flip one bit of one number; bits count from the highest one, the sign."""
    numbers = parameter.detach().t()
    numbers = torch.view_as_real(numbers) if numbers.is_complex() else numbers
    mask = 1 << (8 * numbers.element_size() - 1 - bit)
    numbers.view(TYPES[numbers.dtype]).view(-1)[7] ^= mask if bit else -mask


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("bit", [0, 5, 15])
def test_a_weight_of_which_one_bit_differs_is_named(name: str, bit: int) -> None:
    def job(rank: int, check: PeriodicCheck) -> None:
        models = [small(), of_all_types()]
        models[0].load_state_dict({"weight": torch.ones(3, 2), "bias": torch.zeros(3)})
        for passes in (1, 2):
            when_due(check, None, [], models, passes)
        if rank == 2:
            flip(models[1].get_parameter(name), bit)
        when_due(check, None, [], models, 3)

    expected = f"the weights of rank 2 on host a are not those of rank 0, first in {name}, at backward pass 3: "
    assert expected in one_error(compare(3, job), TrainerError)


@pytest.mark.parametrize(
    ("weights", "order"),
    [
        (torch.eye(2), [1, 0]),
        (torch.arange(16.0).view(4, 4), [0, 2, 1, 3]),
        (torch.arange(7, dtype=torch.bfloat16), [*range(5), 6, 5]),
        (torch.arange(12.0).view(3, 4).t(), [1, 0, 2, 3]),
        (torch.arange(2**20).double().view(4, -1), [0, 2, 1, 3]),
    ],
)
def test_weights_in_another_order_are_other_weights(weights: Tensor, order: list[int]) -> None:
    def job(rank: int, check: PeriodicCheck) -> None:
        when_due(check, None, [], [nn.ParameterList([weights[order] if rank else weights])])

    assert "the weights of rank 1 on host a are not those of rank 0 on host a, first in 0" in one_error(
        compare(2, job), TrainerError
    )


@pytest.mark.parametrize(("ranks", "odd", "named", "same"), [(2, 0, 1, 0), (2, 1, 1, 0), (3, 0, 0, 1), (3, 1, 1, 0)])
def test_the_rank_whose_weights_differ_is_named(ranks: int, odd: int, named: int, same: int) -> None:
    def job(rank: int, check: PeriodicCheck) -> None:
        weights = nn.ParameterDict({"first": nn.Parameter(torch.ones(3)), "second": nn.Parameter(torch.ones(()))})
        if rank == odd:
            weights["second"].data.add_(1e-6)
        when_due(check, None, [], [weights])

    # Of two ranks nobody can say whose are wrong: then both are named with their hosts.
    usual = f"rank {same} on host a" if ranks == 2 else f"rank {same}"
    expected = f"the weights of rank {named} on host a are not those of {usual}, first in second, at"
    assert expected in one_error(compare(ranks, job), TrainerError)


@pytest.mark.parametrize("kept", ["momentum_buffer", "worst"])
def test_what_pytorchs_optimizers_keep_is_compared_before_a_checkpoint(kept: str) -> None:
    """Other optimizers keep what is each rank's own, too."""

    class Others(SGD):
        pass

    def job(rank: int, strategy: Strategy) -> str:
        model = nn.Linear(1, 1, bias=False).requires_grad_(False)
        model.weight.fill_(1.0)
        kind = SGD if kept == "momentum_buffer" else Others
        optimizer = kind(model.parameters(), lr=0.1)
        optimizer.state[model.weight] = {kept: torch.full((1, 1), float(rank == 2))}
        try:
            check_states(strategy, {0: model}, {1: optimizer}, "after update 5")
        except TrainerError as error:
            return str(error)
        return ""

    (said,) = set(Threads(3).run(job))
    expected = (
        "rank 2 on host a are not those of rank 0, first in momentum_buffer of the optimizer's parameter 0, after"
    )
    assert (expected in said) if kept == "momentum_buffer" else not said


def test_weights_that_are_each_ranks_own_are_not_compared() -> None:
    def job(rank: int, check: PeriodicCheck) -> None:
        when_due(check, None, [SGD([nn.Parameter(torch.full((2,), float(rank)))], lr=0.1)], [])

    assert compare(2, job) == [None, None]

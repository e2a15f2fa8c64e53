"""A DataLoader that a script gives to `run.prepare`: its order, batches and options are those of a single process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler, WeightedRandomSampler

from tests.unit.small_trainings import close_all, start, step
from trainer import ConfigError, ShardedLoader, init
from trainer.data.base import Loader
from trainer.data.given import arguments_from
from trainer.data.order import OwnOrder

DATA: Any = [*range(53)]
ROWS: Any = [*torch.arange(53)[:, None]]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def weighted(drawn_by: torch.Generator | None) -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0 + index for index in DATA], 31, generator=drawn_by)


KINDS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: DataLoader(DATA, 8, shuffle=True, generator=generator()),
    "whole batches only": lambda: DataLoader(DATA, 8, shuffle=True, generator=generator(), drop_last=True),
    "in the dataset's order": lambda: DataLoader(DATA, 8),
    "the sampler has a generator": lambda: DataLoader(DATA, 8, sampler=weighted(generator())),
    "of batches": lambda: DataLoader(
        DATA, batch_sampler=BatchSampler(RandomSampler(DATA, generator=generator()), 8, drop_last=True)
    ),
    "both draw from one": lambda: (
        lambda drawn_by: DataLoader(DATA, 8, sampler=weighted(drawn_by), generator=drawn_by)
    )(generator()),
    "with workers that stay": lambda: DataLoader(
        DATA, 8, shuffle=True, generator=generator(), num_workers=1, persistent_workers=True
    ),
    "without batches": lambda: DataLoader(ROWS, None, shuffle=True, generator=generator()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_epoch_is_that_of_the_data_loader(kind: str) -> None:
    given, prepared = KINDS[kind](), init("single").prepare(KINDS[kind]())
    for _ in range(3):
        assert [batch.tolist() for batch in prepared] == [torch.as_tensor(batch).tolist() for batch in given]
    assert len(prepared) == len(given)
    del given, prepared
    gc.collect()  # and their workers


def test_without_a_generator_the_order_follows_seed_and_epoch() -> None:
    run = init("single", seed=4)
    torch.manual_seed(0)
    drawn = [batch.tolist() for batch in run.prepare(DataLoader(DATA, 8, shuffle=True))]
    assert drawn == [batch.tolist() for batch in ShardedLoader(DATA, 8, seed=4)]


def test_options_are_kept_and_its_batch_is_that_of_all_ranks() -> None:
    def collate_fn(samples: list[Any]) -> Any:
        return samples

    given: DataLoader[Any] = DataLoader(
        DATA, 10, collate_fn=collate_fn, num_workers=2, prefetch_factor=3, timeout=9, drop_last=True
    )
    kept = {
        "training": True,
        "collate_fn": collate_fn,
        "num_workers": 2,
        "prefetch_factor": 3,
        "timeout": 9,
        "drop_last": True,
    }
    others = {"dataset": DATA, "shuffle": False, **kept}
    assert arguments_from(given, ranks=4, training=True, per_rank=False) == {"global_batch_size": 10, **others}
    assert arguments_from(given, ranks=4, training=True, per_rank=True) == {"batch_size": 10, **others}
    evaluation = init("single").prepare(DataLoader(DATA, 8), evaluation=DataLoader(DATA, 50))[1]
    assert (evaluation.training, [len(batch) for batch in evaluation]) == (False, [50, 3])


class _Batches(SequentialSampler):
    """A batch sampler whose batches differ in length."""

    def __iter__(self) -> Any:
        yield from ([0, 1, 2], [3])

    def __len__(self) -> int:
        return 2


def test_batches_of_another_kind_go_to_one_rank_each() -> None:
    arguments = arguments_from(DataLoader(DATA, batch_sampler=_Batches(DATA)), ranks=2, training=True, per_rank=False)
    assert type(arguments["batch_sampler"]) is _Batches
    assert not {"batch_size", "global_batch_size", "shuffle", "sampler"} & set(arguments)


class _Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


def test_a_stream_has_no_order_to_give() -> None:
    stream: Dataset[int] = _Stream()
    assert [len(batch) for batch in init("single").prepare(DataLoader(stream, 4))] == [4, 4, 2]


def test_a_batch_that_is_smaller_than_the_number_of_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size is 3, which is the batch of all 4 ranks together; it must be"):
        arguments_from(DataLoader(DATA, 3), ranks=4, training=True, per_rank=False)
    arguments_from(DataLoader(DATA, 3), ranks=4, training=True, per_rank=True)
    assert arguments_from(DataLoader(DATA), ranks=4, training=False, per_rank=False)["global_batch_size"] == 4


class _Filtering(DataLoader[Any]):
    def __iter__(self) -> Any:
        return (batch + 1 for batch in super().__iter__())


class _Named(DataLoader[Any]):
    """Changes nothing that it yields."""

    def __init__(self, data: Any, name: str) -> None:
        super().__init__(data, 4)
        self.name = name

    def describe(self) -> str:
        return self.name


def test_a_data_loader_that_draws_in_its_own_way_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"_Filtering has a __iter__ of its own, which a loader of all ranks would"):
        init("single").prepare(_Filtering(DATA))
    assert len(init("single").prepare(_Named(DATA, "mine"))) == 14


def test_two_data_loaders_that_draw_by_one_generator_are_refused() -> None:
    run, shared = init("single"), generator()
    first = DataLoader(DATA, 4, shuffle=True, generator=shared)
    run.prepare(first)
    run.prepare(first)  # in another epoch
    with pytest.raises(ConfigError, match=r"two DataLoaders draw by one torch\.Generator; give each its own"):
        run.prepare(DataLoader(DATA, 4, sampler=weighted(shared)))


def test_a_sampler_without_a_length_is_told() -> None:
    with pytest.raises(ConfigError, match="_Endless has no __len__, so ranks cannot plan their steps"):
        init("single").prepare(DataLoader(DATA, 4, sampler=_Endless()))


class _Endless(torch.utils.data.Sampler[int]):
    def __iter__(self) -> Any:
        return iter(DATA)


@pytest.mark.parametrize("stop_in", [0, 1], ids=["in the first epoch", "in the second"])
def test_a_run_that_goes_on_draws_what_it_would_have_drawn(tmp_path: Path, stop_in: int) -> None:
    def train(folder: Path, stop_at: tuple[int, int] | None) -> list[tuple[int, list[int]]]:
        run, model, optimizer, checkpoints = start(folder)
        loader: Loader = run.prepare(DataLoader(DATA, 8, shuffle=True, generator=generator()))
        seen: list[tuple[int, list[int]]] = []
        for epoch in run.epochs(3):
            for number, batch in enumerate(loader):
                if (epoch, number) == stop_at:  # the update before was saved as this batch was drawn
                    close_all()
                    return seen
                step(run, model, optimizer, torch.ones(1, 2))
                seen.append((epoch, batch.tolist()))
                if (epoch, number + 1) == stop_at:
                    checkpoints.save()
        close_all()
        return seen

    whole = train(tmp_path / "whole", None)
    begun = train(tmp_path / "stopped", (stop_in, 2))
    assert begun + train(tmp_path / "stopped", None) == whole


def test_workers_that_stay_are_seeded_once_also_over_a_restart() -> None:
    def order() -> OwnOrder:
        given: Any = DataLoader(DATA, 8, shuffle=True, generator=generator(), num_workers=1, persistent_workers=True)
        return OwnOrder(given, given.sampler)

    whole, stopped, restarted = order(), order(), order()
    epochs = [list(whole) for _ in range(3)]
    assert [list(stopped), list(stopped)] == epochs[:2]
    restarted.load_state(stopped.state(is_within=True))
    assert [list(restarted), list(restarted)] == epochs[1:]

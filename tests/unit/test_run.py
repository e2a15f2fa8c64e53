"""The handle in a world of one: what every strategy passes, and what is refused before anything is sent."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DistributedSampler

from tests.distributed.harness import checks_in
from tests.distributed.jobs import HANDLE
from tests.distributed.reference import make_data, make_model, sgd
from trainer import ConfigError, InMemory, Trainer, TrainerConfig, TrainerError, World, init
from trainer.strategies.single import SingleStrategy

CHECKS = checks_in(HANDLE)


@pytest.mark.parametrize("check", CHECKS)
def test_what_every_strategy_does_a_single_rank_does(check: str) -> None:
    getattr(importlib.import_module(CHECKS[check]), check)(SingleStrategy(World()))


def test_a_setting_that_there_is_not_is_named_with_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match=r"init has no setting 'precison'; valid are strategy, config, acc"):
        init("single", precison="bf16")  # type: ignore[call-arg]  # which is what the types are for
    with pytest.raises(ConfigError, match="precision is 'fp8'; valid are fp32, bf16, fp16"):
        init("single", precision="fp8")


def test_a_trainer_trains_on_the_handle_of_a_script() -> None:
    config = TrainerConfig(batch_size=4, device="cpu", seed=3)
    run, model = init("single", config=config), make_model()
    quiet: dict[str, Any] = {"output": None, "progress": False, "run": run}
    trainer = Trainer(model, sgd(model), F.cross_entropy, **quiet)
    assert (trainer.run, trainer.config, trainer.strategy) == (run, config, run.strategy)
    assert len(trainer.fit(make_data(12), epochs=2)) == 2

    assert Trainer(model, sgd(model), F.cross_entropy, config=config, **quiet).config is config
    for other in ({"config": TrainerConfig(seed=4, device="cpu")}, {"strategy": "single"}):
        with pytest.raises(ConfigError, match=r"Trainer was given run, and another strategy or config beside it"):
            Trainer(model, sgd(model), F.cross_entropy, **other, **quiet)
    plain = {**quiet, "run": init("single", accumulate=2)}
    assert Trainer(model, sgd(model), F.cross_entropy, **plain).config == TrainerConfig(accumulate=2)
    with pytest.raises(ConfigError, match="init takes config, or settings one by one; seed was given beside config"):
        init("single", config=config, seed=4)
    with pytest.raises(ConfigError, match=r"init has no setting 'mixed_precision'; valid are .*precision"):
        init("single", mixed_precision="bf16")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"strategy is a TrainerConfig; settings are given as init\(config=...\)"):
        init(config)  # type: ignore[arg-type]


@pytest.mark.distributed
def test_a_mistake_in_the_call_of_init_is_one_line() -> None:
    code = "import trainer; trainer.init(mixed_precision='bf16')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (78, "")
    assert len(done.stderr.splitlines()) == 1
    assert "init has no setting 'mixed_precision'" in done.stderr


def test_what_is_neither_a_model_nor_an_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"was given Linear, InMemory; run\.loader takes datasets"):
        init("single").prepare(nn.Linear(2, 1), make_data(4))  # type: ignore[call-overload]


class Dividing(list[int]):
    """A sampler that leaves the other ranks' samples out, as those that repeat augmentations do."""

    def __init__(self, indices: list[int]) -> None:
        super().__init__(indices)
        self._world_size = 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either batch_size .per rank. or global_batch_size"),
        ({"batch_size": 2, "global_batch_size": 4}, "either batch_size .per rank. or global_batch_size"),
        ({"batch_size": 0}, "batch size is 0; it must be at least 1"),
        ({"global_batch_size": 0}, "global batch size is 0; it must be at least 1"),
        ({"batch_size": 2, "seed": 1}, r"run\.loader takes seed from the run; set it in trainer\.init"),
        ({"batch_size": 2, "shuffle": True, "sampler": [0, 1]}, "shuffle is True, and a sampler draws the order"),
        ({"batch_size": 2, "sampler": iter([0])}, "list_iterator has no __len__"),
        ({"batch_size": 2, "sampler": BatchSampler([0, 1], 2, False)}, "or give it as batch_sampler"),
        ({"batch_size": None}, "a dataset whose items are batches, and those of InMemory are not"),
        ({"batch_size": None, "drop_last": True}, "drop_last is for batches that the loader cuts"),
        ({"batch_sampler": [[0]], "drop_last": True}, "drop_last is for batches that the loader cuts"),
        ({"batch_sampler": [[0]], "batch_size": 2}, "; batch_size and batch_sampler is given"),
        ({"batch_sampler": [[0]], "global_batch_size": 2}, "; global_batch_size and batch_sampler is given"),
        ({"batch_sampler": [[0]], "shuffle": False}, "batch_sampler draws the order .*; leave shuffle=False out"),
        ({"batch_sampler": [[0]], "sampler": [0]}, "batch_sampler draws the order .*; leave sampler out"),
        ({"batch_sampler": iter([[0]])}, "list_iterator has no __len__"),
        ({"batch_sampler": []}, "the batch sampler, list, has no batches"),
        ({"batch_sampler": BatchSampler(DistributedSampler(make_data(4), 2, 0), 2, False)}, "num_replicas=1"),
        ({"batch_size": 2, "sampler": DistributedSampler(make_data(4), 2, 0)}, "leave DistributedSampler out"),
        ({"batch_size": 2, "sampler": Dividing([0, 1])}, "leave Dividing out"),
        ({"batch_size": 5, "drop_last": True}, "drop_last leaves no step: there are 4 samples, and all ranks take 5"),
        (
            {"batch_size": 2, "num_worker": 1},
            "a loader has no option 'num_worker'; valid are shuffle, sampler, batch_sampler, drop_last",
        ),
        ({"batch_size": 2, "collate_fn": list}, "option 'collate_fn' is for datasets that are loaded sample by sample"),
    ],
)
def test_a_loader_that_cannot_be_made_says_why(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        init("single").loader(make_data(4), **arguments)


def test_a_data_loader_is_not_taken_for_a_dataset() -> None:
    with pytest.raises(ConfigError, match="takes a dataset; run"):
        init("single").loader(torch.utils.data.DataLoader(Words()), 1)


class Words(torch.utils.data.Dataset[str]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> str:
        return "abcde"[index]


class Encoded:
    """A batch of a tokenizer: not a tensor, but with `.to`."""

    def __init__(self, codes: Tensor) -> None:
        self.codes, self.moved_to = codes, ""

    def to(self, device: torch.device) -> Encoded:
        self.moved_to = str(device)
        return self


def collate(words: list[str]) -> Encoded:
    return Encoded(torch.tensor([ord(word) for word in words]))


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 3}])
def test_a_collate_function_makes_the_batches_with_and_without_workers(options: dict[str, Any]) -> None:
    loader = init("single").loader(Words(), 2, collate_fn=collate, shuffle=False, **options)
    for _ in range(2):
        batches = list(loader)
        assert [batch.codes.tolist() for batch in batches] == [[97, 98], [99, 100], [101]]
        assert {batch.moved_to for batch in batches} == {"cpu"}


def test_fp16_without_a_prepared_optimizer_is_refused() -> None:
    run, model = init("single", device="cpu", precision="fp16"), nn.Linear(1, 1)
    forward = run.prepare(model)
    with pytest.raises(TrainerError, match="precision is 'fp16', and no optimizer was prepared"):
        run.backward(forward(torch.ones(1, 1)).sum())


def test_print_is_one_line_of_rank_0(capsys: pytest.CaptureFixture[str]) -> None:
    init("single").print("loss", 0.5)
    assert capsys.readouterr().out == "loss 0.5\n"
    init(OfTwo(World(rank=1, size=2))).print("never")
    assert capsys.readouterr().out == ""


class OfTwo(SingleStrategy):
    """Rank 1 of two, as far as printing is concerned."""

    def __init__(self, world: World) -> None:
        self.world, self.tuning, self.description = world, {}, ""

    def connect(self) -> None:
        return

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return value

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]


def test_epochs_are_numbered_from_0() -> None:
    assert list(init("single").epochs(3)) == [0, 1, 2]
    with pytest.raises(ConfigError, match="start is 4; it must be from 0 to the number of epochs, 3"):
        init("single").epochs(3, start=4)
    with pytest.raises(ConfigError, match="epochs is 0; it must be at least 1"):
        init("single").epochs(0)


def test_layers_that_were_frozen_by_eval_stay_so_in_a_training() -> None:
    model = make_model(batch_norm=True)
    frozen = model[1]  # type: ignore[index]
    frozen.eval()
    trainer = Trainer(model, sgd(model), F.cross_entropy, strategy="single", output=None, progress=False,
                      config=TrainerConfig(batch_size=4, device="cpu"))  # fmt: skip
    before = frozen.running_mean.clone()
    trainer.fit(make_data(12), make_data(4), epochs=2)
    assert torch.equal(frozen.running_mean, before)
    assert (model.training, frozen.training) == (True, False)


def test_a_dataset_of_dicts_is_refused_by_the_trainer_in_one_line() -> None:
    model, data = make_model(), make_data(8)
    rows = [{"image": image, "label": label} for image, label in zip(data.inputs, data.targets, strict=True)]
    trainer = Trainer(model, sgd(model), F.cross_entropy, strategy="single", output=None, progress=False,
                      config=TrainerConfig(batch_size=4, device="cpu"))  # fmt: skip
    with pytest.raises(ConfigError, match=r"Trainer takes batches of \(inputs, targets\), and .* are of type dict"):
        trainer.fit(rows, epochs=1)  # type: ignore[arg-type]


def test_a_backward_pass_before_prepare_is_told() -> None:
    run, model = init("single"), nn.Linear(2, 1)
    with pytest.raises(TrainerError, match=r"^run\.backward came before run\.prepare"):
        run.backward(model(torch.ones(1, 2)).sum())
    run.backward(run.prepare(model)(torch.ones(1, 2)).sum())  # an optimizer comes later, or never


def test_zero_grad_within_an_update_is_told() -> None:
    run, model = init("single", accumulate=2), nn.Linear(2, 1)
    forward, optimizer = run.prepare(model, sgd(model))
    inputs = iter(run.loader(InMemory(torch.ones(4, 2), torch.ones(4)), 1))
    optimizer.zero_grad()  # right before an update's first batch
    for _ in range(2):
        run.backward(forward(next(inputs)[0]).sum())
    optimizer.step()
    optimizer.zero_grad()
    run.backward(forward(next(inputs)[0]).sum())
    optimizer.zero_grad()
    next(inputs)
    with pytest.raises(TrainerError, match=r"earlier batches are gone, and accumulate is 2; call zero_grad only after"):
        run.backward(forward(torch.ones(1, 2)).sum())


def order_of(loader: Any) -> list[int]:
    return [int(place) for batch in loader for place in batch]


def test_a_loader_that_is_made_within_an_epoch_has_its_order() -> None:
    run = init("single", seed=5)
    loader = run.loader(list(range(64)), 8)
    expected = [order_of(loader) for _ in run.epochs(3)]
    again = init("single", seed=5)
    assert [order_of(again.loader(list(range(64)), 8)) for _ in again.epochs(3)] == expected
    resumed = init("single", seed=5)
    assert [order_of(resumed.loader(list(range(64)), 8)) for _ in resumed.epochs(3, start=1)] == expected[1:]


def test_two_loaders_of_a_run_have_different_orders_and_evaluations_change_none() -> None:
    run = init("single")
    orders = [order_of(run.loader(list(range(64)), 8)) for _ in range(3)]
    assert len(set(map(tuple, orders))) == 3  # as of two datasets that are gone through together, or one of each epoch
    other = init("single")
    other.loader(list(range(64)), 8, training=False)
    assert order_of(other.loader(list(range(64)), 8)) == orders[0]


def test_a_dataset_that_has_grown_wants_another_loader() -> None:
    run, data = init("single"), list(range(8))
    loader = run.loader(data, 4)
    data += range(8, 12)
    with pytest.raises(ConfigError, match="had 8 samples when its loader was made, and has 12 now; make another"):
        next(iter(loader))
    assert sorted(order_of(run.loader(data, 4))) == data

"""Trainer in a world of one: the loop does what a loop written by hand does, and says so when it cannot."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from tests.unit.test_loader import Endless, Pairs
from trainer import (
    Callback,
    ConfigError,
    EpochRecord,
    FitContext,
    InMemory,
    ProgressEvent,
    Trainer,
    TrainerConfig,
    TrainerError,
    UpdateRecord,
    accuracy,
    init,
)
from trainer.data.shard_plan import permutation

Loss = Callable[[Any, Any], Tensor]


def blobs(samples: int, dtype: torch.dtype = torch.float64) -> InMemory:
    """Points around three corners, and which corner."""
    generator = torch.Generator().manual_seed(3)
    targets = torch.arange(samples) % 3
    inputs = torch.randn(samples, 4, generator=generator, dtype=dtype)
    inputs[torch.arange(samples), targets] += 3
    return InMemory(inputs, targets)


def network(dtype: torch.dtype = torch.float64, *, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)).to(dtype)


def make(model: nn.Module | None = None, loss: Loss = F.cross_entropy, lr: float = 0.1, **settings: Any) -> Trainer:
    """A trainer that neither prints nor writes, with a plain learning rate unless the test asks for more."""
    model = model or network()
    own = {name: settings.pop(name) for name in ("metrics", "callbacks", "output") if name in settings}
    plain = {"device": "cpu", "batch_size": 10, "scale_lr": False, "decay": "none"}
    return Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        loss,
        strategy="single",
        config=TrainerConfig(**{**plain, **settings}),
        progress=False,
        **{"output": None, **own},
    )


def weights(trainer: Trainer) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def fitted(data: Dataset[Any], *, epochs: int = 2, **settings: Any) -> Tensor:
    trainer = make(**settings)
    trainer.fit(data, epochs=epochs)
    return weights(trainer)


def test_the_loss_falls_and_every_sample_is_trained_on() -> None:
    trainer = make(metrics={"accuracy": accuracy})
    records = trainer.fit(blobs(95), blobs(31), epochs=4)
    losses = [record.train_loss for record in records]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 2
    assert [(record.epoch, record.epochs, record.samples, record.world_size) for record in records] == [
        (epoch, 4, 95, 1) for epoch in (1, 2, 3, 4)
    ]
    assert records[-1].validation is not None
    assert records[-1].validation.metrics["accuracy"] > 0.9
    assert records[0].samples_per_s == pytest.approx(95 / records[0].seconds)


def test_fit_is_bit_for_bit_the_loop_that_one_would_write_by_hand() -> None:
    data, model = blobs(25), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        for index in permutation(25, epoch=epoch, seed=0).split(10):
            optimizer.zero_grad()
            F.cross_entropy(model(data.inputs[index]), data.targets[index]).backward()
            optimizer.step()
    by_hand = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert torch.equal(fitted(data), by_hand)


def test_the_training_loss_is_the_mean_over_samples_at_the_time_of_their_step() -> None:
    data = blobs(25)
    order = permutation(25, epoch=0, seed=0)
    # With a learning rate of next to nothing the weights stay, and so does each sample's loss.
    (record,) = make(lr=1e-12).fit(data, epochs=1)
    expected = F.cross_entropy(network()(data.inputs[order]), data.targets[order]).item()
    assert record.train_loss == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("samples", [60, 67, 61, 41])
@pytest.mark.parametrize("accumulate", [2, 3])
@pytest.mark.parametrize("extra", [{}, {"clip_norm": 0.1}, {"decay": "cosine"}], ids=["plain", "clipped", "decayed"])
def test_accumulating_k_batches_equals_one_batch_k_times_as_large(
    samples: int, accumulate: int, extra: dict[str, Any]
) -> None:
    # 60 are full updates; 67, 61 and 41 leave a last one of several micro-batches, the last of them short.
    data = blobs(samples)
    added_up = fitted(data, batch_size=10, accumulate=accumulate, **extra)
    at_once = fitted(data, batch_size=10 * accumulate, **extra)
    torch.testing.assert_close(added_up, at_once, rtol=1e-12, atol=1e-12)


def test_accumulation_counts_updates_for_the_learning_rate() -> None:
    rates: list[float] = []

    class Rates(Callback):
        def on_epoch_end(self, context: FitContext, record: EpochRecord) -> None:
            rates.append(record.learning_rate)

    # Twice the rate for 2 micro-batches, reached after two epochs of three updates each.
    trainer = make(accumulate=2, scale_lr=True, warmup_epochs=2, callbacks=[Rates()])
    records = trainer.fit(blobs(60), epochs=3)
    assert rates == pytest.approx([0.15, 0.2, 0.2])
    assert [record.learning_rate for record in records] == rates


@pytest.mark.parametrize("norm", [1e-3, 1e3])
def test_clipping_limits_the_norm_of_the_gradient_and_leaves_a_smaller_one_alone(norm: float) -> None:
    data = blobs(10)
    before = weights(make())
    moved = {clip: fitted(data, epochs=1, lr=1.0, clip_norm=clip) - before for clip in (norm, None)}
    # One step with a learning rate of 1 and no momentum yet: the weights move by the gradient.
    free = moved[None].norm().item()
    assert moved[norm].norm().item() == pytest.approx(min(norm, free), rel=1e-4)
    torch.testing.assert_close(moved[norm] / moved[norm].norm(), moved[None] / free)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("extra", [{}, {"accumulate": 2}, {"clip_norm": 1.0}], ids=["plain", "accumulated", "clipped"])
def test_half_precision_trains_like_full_precision_about_as_well(precision: str, extra: dict[str, Any]) -> None:
    data = blobs(60, torch.float32)
    kinds: set[torch.dtype] = set()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        kinds.add(outputs.dtype)
        return F.cross_entropy(outputs.float(), targets)

    full = make(network(torch.float32), **extra).fit(data, epochs=3)
    half = make(network(torch.float32), loss, precision=precision, **extra).fit(data, data, epochs=3)
    assert kinds == {torch.bfloat16 if precision == "bf16" else torch.float16}
    assert half[-1].train_loss == pytest.approx(full[-1].train_loss, rel=0.05)


@pytest.mark.parametrize("channels_last", [True, False])
def test_images_reach_the_model_in_the_order_that_was_asked_for(channels_last: bool) -> None:
    kept: list[bool] = []

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(2, 3, 3)

        def forward(self, images: Tensor) -> Tensor:
            kept.append(images.is_contiguous(memory_format=torch.channels_last))
            outputs: Tensor = self.layer(images).flatten(1)
            return outputs

    data = InMemory(torch.randn(6, 2, 5, 5), torch.zeros(6, dtype=torch.int64))
    make(Images(), channels_last=channels_last).fit(data, data, epochs=1)
    assert set(kept) == {channels_last}


def test_a_loss_that_is_no_number_ends_training_and_names_the_epoch() -> None:
    calls = itertools.count(1)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        # Three steps an epoch: the fifth is in the second.
        return F.cross_entropy(outputs, targets) * (math.nan if next(calls) == 5 else 1.0)

    with pytest.raises(TrainerError, match=r"the loss turned nan in epoch 2, by sample 30, at learning rate 0\.1"):
        make(loss=loss).fit(blobs(30), epochs=5)


def test_an_infinite_loss_is_noticed_while_the_epoch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.trainer._PROGRESS_INTERVAL_S", 0.0)
    steps: list[int] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        steps.append(len(targets))
        return F.cross_entropy(outputs, targets) / 0.0

    with pytest.raises(TrainerError, match="the loss turned inf in epoch 1, by sample 10"):
        make(loss=loss).fit(blobs(30), epochs=1)
    assert steps == [10]


@pytest.mark.parametrize("epochs", [0, -1])
def test_epochs_that_are_not_positive_are_refused(epochs: int) -> None:
    with pytest.raises(ConfigError, match=f"epochs is {epochs}; it must be at least 1"):
        make().fit(blobs(10), epochs=epochs)


def empty() -> InMemory:
    return InMemory(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))


@pytest.mark.parametrize(
    ("train", "validation", "message"),
    [
        (empty(), None, "samples is 0"),
        (blobs(30), empty(), "samples is 0"),
        (Endless(), None, "Trainer takes map-style datasets, and Endless can only"),
        (blobs(30), Endless(), "Trainer takes map-style datasets, and Endless can only"),
    ],
    ids=["nothing to train on", "nothing to validate on", "endless training", "endless validation"],
)
def test_a_dataset_that_cannot_be_used_is_refused_before_the_first_step(
    train: Dataset[Any], validation: Dataset[Any] | None, message: str
) -> None:
    steps: list[int] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        steps.append(len(targets))
        return F.cross_entropy(outputs, targets)

    with pytest.raises(ConfigError, match=message):
        make(loss=loss).fit(train, validation, epochs=1)
    assert steps == []


@pytest.mark.parametrize("eval_batch_size", [None, 1, 7, 100])
def test_an_evaluation_counts_every_sample_once(eval_batch_size: int | None) -> None:
    data = blobs(23)
    trainer = make(eval_batch_size=eval_batch_size, metrics={"accuracy": accuracy})
    found = trainer.evaluate(data)
    assert found.evaluated == found.samples == 23
    outputs = network()(data.inputs)
    assert found.metrics["loss"] == pytest.approx(F.cross_entropy(outputs, data.targets).item(), rel=1e-12)
    assert found.metrics["accuracy"] == (outputs.argmax(1) == data.targets).sum().item() / 23


@pytest.mark.parametrize("after_training", [False, True])
def test_an_evaluation_takes_the_datasets_order_and_the_evaluations_batch_size(after_training: bool) -> None:
    seen: list[list[int]] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(targets.tolist())
        return F.cross_entropy(outputs, targets)

    data, trainer = blobs(20), make(loss=loss, eval_batch_size=9)
    if after_training:
        trainer.fit(blobs(10), data, epochs=1)
    else:
        trainer.evaluate(data)
    assert seen[-3:] == [part.tolist() for part in data.targets.split(9)]


def test_an_evaluation_neither_trains_nor_drops_out() -> None:
    trainer = make(network(dropout=0.9))
    before, noise = weights(trainer), torch.random.get_rng_state()
    assert trainer.evaluate(blobs(20)) == trainer.evaluate(blobs(20))
    assert torch.equal(weights(trainer), before)
    assert torch.equal(torch.random.get_rng_state(), noise)


@pytest.mark.parametrize("training", [True, False])
def test_an_evaluation_leaves_the_model_in_the_mode_it_was_in(training: bool) -> None:
    trainer = make()
    trainer.model.train(training)
    trainer.evaluate(blobs(20))
    assert trainer.model.training is training


@pytest.mark.parametrize("in_memory", [True, False])
def test_validating_does_not_change_what_is_trained(in_memory: bool) -> None:
    data = blobs(30)
    held_out = blobs(12) if in_memory else Pairs(blobs(12).inputs, blobs(12).targets)
    with_validation, without = make(network(dropout=0.5)), make(network(dropout=0.5))
    with_validation.fit(data, held_out, epochs=3)
    without.fit(data, epochs=3)
    assert torch.equal(weights(with_validation), weights(without))


def is_interrupted(trainer: Trainer) -> None:
    class Fails(Callback):
        def on_epoch_end(self, context: FitContext, record: EpochRecord) -> None:
            raise KeyboardInterrupt

    trainer.callbacks.append(Fails())
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(blobs(30), epochs=2)


def goes_well(trainer: Trainer) -> None:
    trainer.fit(blobs(30), epochs=2)


@pytest.mark.parametrize("fit", [goes_well, is_interrupted])
def test_the_learning_rate_is_restored_after_fit_whatever_its_end(fit: Callable[[Trainer], None]) -> None:
    trainer = make(lr=0.3, scale_lr=True, accumulate=2, decay="cosine")
    fit(trainer)
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.3]


@pytest.mark.parametrize(("per", "expected"), [("update", [0.05, 0.0125]), ("epoch", [0.1, 0.05])])
def test_a_scheduler_that_is_handed_in_alone_sets_the_learning_rate(per: str, expected: list[float]) -> None:
    """Of two updates an epoch: a record has the rate of its last one."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    trainer = Trainer(
        model, optimizer, F.cross_entropy, strategy="single", config=TrainerConfig(batch_size=10, device="cpu"),
        lr_scheduler=scheduler, lr_scheduler_per=per, output=None, progress=False,
    )  # fmt: skip
    assert [record.learning_rate for record in trainer.fit(blobs(20), epochs=2)] == expected


@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_so_many_updates_the_mean_loss_since_the_last_point_is_reported(accumulate: int) -> None:
    losses, points = [], []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        losses.append(F.cross_entropy(outputs, targets))
        return losses[-1]

    class Points(Callback):
        def on_update(self, context: FitContext, record: UpdateRecord) -> None:
            points.append(record)

    # 35 samples in batches of 5 are 7 updates, or 4 of two batches each, the last of one.
    trainer = make(
        loss=loss, batch_size=5, accumulate=accumulate, log_every_updates=3, callbacks=[Points()], warmup_epochs=0
    )
    trainer.fit(blobs(35), epochs=2)
    steps_of = {3: (0, 3), 6: (3, 6), 7: (6, 7), 9: (7, 9), 12: (9, 12), 14: (12, 14)}
    if accumulate == 2:
        steps_of = {3: (0, 6), 4: (6, 7), 6: (7, 11), 8: (11, 14)}
    updates = [(number, 1 + (end > 7), slice(start, end)) for number, (start, end) in steps_of.items()]
    assert [(point.update, point.epoch) for point in points] == [update[:2] for update in updates]
    assert [point.samples for point in points] == [5 * update[2].stop for update in updates]
    for point, (_, _, steps) in zip(points, updates, strict=True):
        assert point.loss == pytest.approx(torch.stack(losses[steps]).mean().item(), rel=1e-12)
        assert point.learning_rate == pytest.approx(0.1)
    assert fitted(blobs(35), log_every_updates=1).equal(fitted(blobs(35), log_every_updates=0))


def test_a_loss_that_is_not_finite_at_a_point_is_refused_there() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.sum() * math.inf

    with pytest.raises(TrainerError, match="in epoch 1, by sample 20, at learning rate"):
        make(loss=loss, log_every_updates=2).fit(blobs(100), epochs=1)


class EventLog(Callback):
    """Records its calls."""

    def __init__(self, name: str, events: list[tuple[str, str, Any]]) -> None:
        self._name, self._events = name, events

    def on_fit_start(self, context: FitContext) -> None:
        self._events.append((self._name, "fit starts", context.epochs))

    def on_progress(self, context: FitContext, event: ProgressEvent) -> None:
        self._events.append((self._name, "progress", event.done))

    def on_epoch_end(self, context: FitContext, record: EpochRecord) -> None:
        self._events.append((self._name, "epoch ends", record))

    def on_fit_end(self, context: FitContext, records: list[EpochRecord]) -> None:
        self._events.append((self._name, "fit ends", records))


def test_callbacks_are_called_in_their_order_with_what_fit_returns() -> None:
    events: list[tuple[str, str, Any]] = []
    records = make(callbacks=[EventLog("a", events), EventLog("b", events)]).fit(blobs(30), epochs=2)
    assert events == [
        (name, event, fact)
        for event, fact in (
            ("fit starts", 2),
            ("epoch ends", records[0]),
            ("epoch ends", records[1]),
            ("fit ends", records),
        )
        for name in ("a", "b")
    ]


def test_a_progress_event_has_the_number_of_samples_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.trainer._PROGRESS_INTERVAL_S", 0.0)
    events: list[tuple[str, str, Any]] = []
    make(callbacks=[EventLog("a", events)]).fit(blobs(25), epochs=1)
    assert [fact for _, event, fact in events if event == "progress"] == [10, 20, 25]


def test_progress_events_come_at_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.trainer._PROGRESS_INTERVAL_S", 1e9)
    events: list[tuple[str, str, Any]] = []
    make(callbacks=[EventLog("a", events)]).fit(blobs(25), epochs=1)
    assert "progress" not in {event for _, event, _ in events}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_same_seed_gives_the_same_weights_bit_by_bit_and_another_seed_others(dropout: float) -> None:
    def run(seed: int) -> Tensor:
        model = network(dropout=dropout)
        torch.seed()  # whatever happened in the process before
        return fitted(blobs(35), model=model, seed=seed)

    assert torch.equal(run(5), run(5))
    assert not torch.equal(run(5), run(6))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_dataloader_dataset_gives_the_same_weights_as_the_same_data_in_memory(dropout: float) -> None:
    data = blobs(35)
    loaded = fitted(Pairs(data.inputs, data.targets), model=network(dropout=dropout))
    assert torch.equal(loaded, fitted(data, model=network(dropout=dropout)))


def test_the_model_stays_the_one_that_was_given() -> None:
    model = network()
    before = list(model.parameters())
    trainer = make(model)
    trainer.fit(blobs(20), epochs=1)
    assert trainer.model is model
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))


def test_the_default_record_of_a_second_fit_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = make(output="auto")
    for number in (1, 2):
        trainer.fit(blobs(20), epochs=1)
        assert len(list((tmp_path / "runs").glob("*/summary.json"))) == number


def test_a_loop_of_ones_own_gives_the_weights_of_fit() -> None:
    data, model = blobs(25), network()
    run = init("single", device="cpu")
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    loader = run.loader(data, 10)
    for _ in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            run.backward(F.cross_entropy(model(inputs), targets))
            optimizer.step()
    by_hand = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert torch.equal(by_hand, fitted(data))


def test_batch_norm_over_the_global_batch_is_the_models_own_in_a_world_of_one() -> None:
    def run(*, sync_batch_norm: bool) -> Tensor:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
        trainer = make(model, sync_batch_norm=sync_batch_norm)
        trainer.fit(blobs(32), epochs=2)
        return torch.cat([weights(trainer), *(buffer.double().flatten() for buffer in model.buffers())])

    torch.testing.assert_close(run(sync_batch_norm=True), run(sync_batch_norm=False), rtol=1e-10, atol=1e-10)


def test_a_strategy_that_there_is_not_is_refused_when_the_trainer_is_made() -> None:
    with pytest.raises(ConfigError, match="strategy is 'nope'"):
        Trainer(network(), torch.optim.SGD(network().parameters()), F.cross_entropy, strategy="nope", output=None)

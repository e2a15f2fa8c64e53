"""What callbacks are told of a fit, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.unit.blobs import blobs, fitted, make
from trainer import Callback, EpochRecord, FitContext, ProgressEvent, UpdateRecord


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

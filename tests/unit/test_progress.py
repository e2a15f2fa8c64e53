"""Progress: plain lines now and then where there is no terminal, and on rank 0 only."""

from __future__ import annotations

import pytest

from tests.unit.contexts import make_context
from trainer import EpochRecord, Evaluation, FitContext, ProgressEvent, World
from trainer.report.progress import Progress

RATE = "learning rate 0.1, then constant"


class Clock:
    """A time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("trainer.report.progress.time", clock)
    monkeypatch.setattr("trainer.report.display.time", clock)
    return clock


def context_on(rank: int = 0, launcher: str = "python") -> FitContext:
    return make_context(World(rank=rank, size=2, launcher=launcher))


def event(done: int, epoch: int = 1) -> ProgressEvent:
    return ProgressEvent(epoch=epoch, epochs=2, done=done, samples=1000, loss=0.5, seconds=done / 100)


def epoch(number: int, validation: Evaluation | None = None) -> EpochRecord:
    return EpochRecord(
        epoch=number, epochs=2, train_loss=0.25, samples=1000, seconds=4.0, learning_rate=0.1, validation=validation
    )


def test_lines_come_at_the_interval_and_not_with_every_event(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    progress, context = Progress(every_s=10.0), context_on()
    progress.on_fit_start(context)
    for second in range(1, 31):
        clock.now += 1
        progress.on_progress(context, event(done=10 * second))
    lines = capsys.readouterr().out.splitlines()
    # 100 samples take 10 s, so that the remaining 1,900 of two epochs take 190.
    assert lines == [
        RATE,
        "epoch 1/2  100/1000  loss 0.5000  100 samples/s  3:10 left",
        "epoch 1/2  200/1000  loss 0.5000  100 samples/s  3:00 left",
        "epoch 1/2  300/1000  loss 0.5000  100 samples/s  2:50 left",
    ]


def test_an_epochs_end_is_always_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    progress, context = Progress(every_s=1e9), context_on()
    progress.on_fit_start(context)
    evaluation = Evaluation(metrics={"loss": 0.125, "accuracy": 0.9876, "error": 0.35}, evaluated=99, samples=100)
    progress.on_epoch_end(context, epoch(1))
    progress.on_epoch_end(context, epoch(2, evaluation))
    assert capsys.readouterr().out.splitlines() == [
        RATE,
        "epoch 1/2: loss 0.2500, 4.00 s (250 samples/s)",
        "epoch 2/2: loss 0.2500, validation loss 0.1250, accuracy 98.76 %, error 0.3500, evaluated 99/100, "
        "4.00 s (250 samples/s)",
    ]

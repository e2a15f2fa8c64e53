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
    for second in range(31):
        progress.on_progress(context, event(done=10 * second))
        clock.now += 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        RATE,
        "epoch 1/2:  10% 100/1000 [00:10<01:30, 10.00 samples/s, loss 0.5000]",
        "epoch 1/2:  20% 200/1000 [00:20<01:20, 10.00 samples/s, loss 0.5000]",
        "epoch 1/2:  30% 300/1000 [00:30<01:10, 10.00 samples/s, loss 0.5000]",
    ]
    # A fit that goes on has no rate of the samples before: 20 in 10 s, the first line of a pass aside.
    progress.on_progress(context, event(epoch=2, done=700))
    clock.now += 10
    progress.on_progress(context, event(epoch=2, done=720))
    assert "epoch 2/2:  72% 720/1000 [00:10<02:20,  2.00 samples/s" in capsys.readouterr().out


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

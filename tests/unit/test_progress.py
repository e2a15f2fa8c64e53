"""Progress: plain lines now and then where there is no terminal, a bar on one, and both on rank 0 only."""

from __future__ import annotations

import io
import sys

import pytest

from tests.unit.contexts import make_context
from trainer import EpochRecord, Evaluation, FitContext, ProgressEvent, World
from trainer.callbacks.progress import Progress

RATE = "learning rate 0.1, then constant"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """A time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("trainer.callbacks.progress.time", clock)
    return clock


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    # No fixture: pytest puts its own stream back between a test's set-up and its call.
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


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


def test_a_long_job_shows_hours_left(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    progress, context = Progress(every_s=10.0), context_on()
    progress.on_fit_start(context)
    clock.now += 60
    progress.on_progress(context, event(done=10))
    # 1,990 samples at 6 s each.
    assert capsys.readouterr().out.endswith(" 3:19:00 left\n")


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


@pytest.mark.parametrize("on_terminal", [False, True])
def test_other_ranks_show_nothing(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, on_terminal: bool
) -> None:
    terminal = open_terminal(monkeypatch) if on_terminal else None
    progress, context = Progress(every_s=0.0), context_on(rank=1)
    progress.on_fit_start(context)
    clock.now += 5
    progress.on_progress(context, event(done=500))
    progress.on_epoch_end(context, epoch(1))
    assert capsys.readouterr() == ("", "")
    assert terminal is None or terminal.getvalue() == ""


def test_a_terminal_gets_a_bar_that_redraws_itself_with_every_event(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = open_terminal(monkeypatch)
    progress, context = Progress(every_s=10.0), context_on()
    progress.on_fit_start(context)
    for done in (250, 750):
        clock.now += done / 100
        progress.on_progress(context, event(done))
    drawn = terminal.getvalue()
    assert "\r" in drawn
    assert "\n" not in drawn
    assert "epoch 1/2" in drawn
    assert " 25%|" in drawn
    assert " 75%|" in drawn
    assert "loss 0.5000, 100 samples/s" in drawn
    assert capsys.readouterr().out == f"{RATE}\n"


def test_the_bar_goes_when_the_epoch_ends_and_the_next_one_starts_anew(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = open_terminal(monkeypatch)
    progress, context = Progress(), context_on()
    progress.on_fit_start(context)
    progress.on_progress(context, event(900))
    progress.on_epoch_end(context, epoch(1))
    # Wiped: the last thing on the line is blanks and a return.
    assert terminal.getvalue().endswith("\r")
    assert capsys.readouterr().out == f"{RATE}\nepoch 1/2: loss 0.2500, 4.00 s (250 samples/s)\n"
    before = len(terminal.getvalue())
    progress.on_progress(context, event(100, epoch=2))
    assert "epoch 2/2" in terminal.getvalue()[before:]
    assert " 10%|" in terminal.getvalue()[before:]
    progress.on_epoch_end(context, epoch(2))


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun", "srun"])
def test_launchers_that_pass_on_whole_lines_get_lines_even_on_a_terminal(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], launcher: str
) -> None:
    terminal = open_terminal(monkeypatch)
    progress, context = Progress(every_s=1.0), context_on(launcher=launcher)
    progress.on_fit_start(context)
    clock.now += 2
    progress.on_progress(context, event(200))
    assert terminal.getvalue() == ""
    assert capsys.readouterr().out.count("\n") == 2

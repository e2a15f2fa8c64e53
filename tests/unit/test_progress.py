"""Progress: plain lines now and then where there is no terminal, a bar on one, and both on rank 0 only."""

from __future__ import annotations

import os
import pty
import struct
import termios
from collections.abc import Callable, Iterator
from contextlib import suppress
from fcntl import ioctl

import pytest

from tests.screen import Screen
from tests.unit.contexts import make_context
from trainer import EpochRecord, Evaluation, FitContext, ProgressEvent, World
from trainer.report.display import BottomLine
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


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may run on one."""
    monkeypatch.setattr("trainer.report.display.find_bottom_line", lambda: None)


@pytest.fixture
def terminal(no_terminal: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Screen]]:
    """A terminal in the foreground; returns what is to be seen on it."""
    ours, theirs = pty.openpty()
    screen = Screen(100, 12)
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", screen.lines, screen.columns, 0, 0))
    os.set_blocking(ours, False)
    monkeypatch.setattr(BottomLine, "in_foreground", lambda self: True)
    monkeypatch.setattr("trainer.report.display.find_bottom_line", lambda: BottomLine(os.dup(theirs), os.getpid()))

    def seen() -> Screen:
        with suppress(BlockingIOError):
            screen.feed(os.read(ours, 2**16).decode())
        return screen

    yield seen
    os.close(ours)
    os.close(theirs)


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


def test_other_ranks_show_nothing(
    clock: Clock, capsys: pytest.CaptureFixture[str], terminal: Callable[[], Screen]
) -> None:
    progress, context = Progress(every_s=0.0), context_on(rank=1)
    progress.on_fit_start(context)
    clock.now += 5
    progress.on_progress(context, event(done=500))
    progress.on_epoch_end(context, epoch(1))
    assert capsys.readouterr() == ("", "")
    assert terminal().text() == []


def test_a_terminal_gets_a_bar_that_redraws_itself_with_every_event(
    clock: Clock, terminal: Callable[[], Screen], capsys: pytest.CaptureFixture[str]
) -> None:
    progress, context = Progress(every_s=0.0), context_on(launcher="mpirun")
    progress.on_fit_start(context)
    for done, share, left in ((250, " 25%|", "0:18 left"), (750, " 75%|", "0:17 left")):
        clock.now += done / 100
        progress.on_progress(context, event(done))
        assert terminal().last_line().startswith(f"epoch 1/2 {share}")
        assert terminal().last_line().endswith(f"| loss 0.5000, 100 samples/s, {left}")
    assert len(terminal().text()) == 12  # and nothing above it
    assert [line for line in terminal().text() if line] == [terminal().last_line()]
    progress.on_epoch_end(context, epoch(1))
    assert capsys.readouterr().out == f"{RATE}\nepoch 1/2: loss 0.2500, 4.00 s (250 samples/s)\n"


def test_the_bar_goes_when_the_epoch_ends_and_the_next_one_starts_anew(terminal: Callable[[], Screen]) -> None:
    progress, context = Progress(), context_on()
    progress.on_fit_start(context)
    progress.on_progress(context, event(900))
    assert terminal().bottom == 10
    progress.on_epoch_end(context, epoch(1))
    assert (terminal().text(), terminal().bottom) == ([], 11)
    progress.on_progress(context, event(100, epoch=2))
    assert terminal().last_line().startswith("epoch 2/2  10%|")
    progress.on_epoch_end(context, epoch(2))
    assert terminal().text() == []

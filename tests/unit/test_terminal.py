"""Rank 0's progress on a terminal, and where standard error ends elsewhere."""

from __future__ import annotations

import sys
from unittest.mock import Mock, call

import pytest

from tests.distributed.harness import ROOT
from tests.terminal import Session, run_on_terminal
from trainer.report import display

SCRIPT = """
from trainer.cluster.output import print_line
from trainer.report.display import Display
display = Display(0.0)
for step in range(10):
    display.show("epoch 1/2", step, {samples}, ["loss 0.5", "9 samples/s"])
    if step == 5:
        print_line("a whole line")
display.clear()
print("the end")
"""


def run(shell: str = "", samples: int | None = 10) -> Session:
    command = [sys.executable, "-c", SCRIPT.format(samples=samples)]
    if shell:
        command = ["sh", "-c", shell, "sh", *command]
    return run_on_terminal(command, env={"PYTHONPATH": str(ROOT)})


def seen(session: Session) -> list[str]:
    """Return the lines that stay on the terminal: what follows a carriage return takes the line's place."""
    lines = [line.rstrip("\r").rpartition("\r")[2].strip() for line in session.text.split("\n")]
    return [line for line in lines if line]


def test_a_terminal_gets_a_bar_that_goes_and_that_tears_no_line_of_the_librarys() -> None:
    session = run()
    assert "epoch 1/2  90%|" in session.text
    assert "| 9/10, loss 0.5, 9 samples/s" in session.text
    assert seen(session) == ["a whole line", "the end"]


def test_a_stream_without_a_length_has_a_count() -> None:
    session = run(samples=None)
    assert "epoch 1/2  9, loss 0.5, 9 samples/s" in session.text
    assert seen(session) == ["a whole line", "the end"]


def test_a_pass_within_another_has_a_bar_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Mock()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(display, "_make_bar", make)
    shown = display.Display(0.0)
    for head, samples in (("epoch 1", 10), ("evaluation", 4), ("evaluation", 4), ("epoch 1", 10)):
        shown.show(head, 3, samples, [])
    shown.clear()
    assert make.call_args_list == [call("epoch 1", 10), call("evaluation", 4), call("epoch 1", 10)]


@pytest.mark.parametrize("shell", ['"$@" 2> /dev/null', '"$@" 2>&1 | cat', 'TQDM_DISABLE=1 "$@"'])
def test_where_standard_error_ends_elsewhere_or_no_bar_is_wanted_there_are_lines(shell: str) -> None:
    session = run(shell)
    assert "%|" not in session.text
    lines = [f"epoch 1/2  {step}/10  loss 0.5  9 samples/s" for step in range(10)]
    assert seen(session) == [*lines[:6], "a whole line", *lines[6:], "the end"]

"""Rank 0's progress on a terminal, and where standard error ends elsewhere."""

from __future__ import annotations

import re
import sys
from unittest.mock import Mock

import pytest

from tests.distributed.harness import ROOT
from tests.terminal import Session, run_on_terminal
from trainer.report.display import Display

SCRIPT = """
import time
from trainer.cluster.output import print_line
from trainer.report.display import Display
display = Display(0.0)
for step in range(10):
    display.show("epoch 1/2", step, {samples}, ["loss 0.5", "lr 0.1"])
    time.sleep(0.07)
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
    assert "epoch 1/2:   0%|" in session.text
    assert re.search(r"\| [4-9]/10 \[00:00<00:00, [ 0-9.]+ samples/s, loss 0\.5, lr 0\.1\]", session.text)
    assert seen(session) == ["a whole line", "the end"]


def test_a_stream_without_a_length_has_a_count() -> None:
    session = run(samples=None)
    assert re.search(r"epoch 1/2: [4-9] samples \[00:00, [ 0-9.]+ samples/s, loss 0\.5, lr 0\.1\]", session.text)
    assert seen(session) == ["a whole line", "the end"]


def test_a_pass_within_another_has_a_bar_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Mock()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("tqdm.auto.tqdm", make)
    shown = Display(0.0)
    for head, samples in (("epoch 1", 10), ("evaluation", 4), ("evaluation", 4), ("epoch 1", 10)):
        shown.show(head, 3, samples, [])
    shown.clear()
    bars = [(bar.kwargs["desc"], bar.kwargs["total"], bar.kwargs["initial"]) for bar in make.call_args_list]
    assert bars == [("epoch 1", 10, 3), ("evaluation", 4, 3), ("epoch 1", 10, 3)]


@pytest.mark.parametrize("shell", ['"$@" 2> /dev/null', '"$@" 2>&1 | cat', 'TQDM_DISABLE=1 "$@"'])
def test_where_standard_error_ends_elsewhere_or_no_bar_is_wanted_there_are_lines(shell: str) -> None:
    session = run(shell)
    assert "%|" not in session.text
    lines = [f"epoch 1/2: {10 * step:3}% {step}/10 [" for step in range(1, 10)]
    shown = [line.partition("[")[0] + "[" * ("[" in line) for line in seen(session)]
    assert shown == [*lines[:5], "a whole line", *lines[5:], "the end"]

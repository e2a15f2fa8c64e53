"""Lines reach the launcher whole: what it gets of a write, it may put between two writes of another rank."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from trainer.cluster import output

PRINTS = "print('loss', 0.5); print('of', 'all'); print('warning', 1, file=sys.stderr)"
FAILS = "from trainer.watch.failure import report_failures; report_failures(); 1 / 0"


def writes_of(script: str, *options: str) -> list[str]:
    """Return what a script writes, write by write."""
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps writes apart
    command = [sys.executable, *options, "-c", f"import sys; {script}"]
    with reader:
        with writer:
            subprocess.run(command, stdout=writer.fileno(), stderr=writer.fileno(), timeout=60, check=False)
        return [*iter(lambda: reader.recv(2**16).decode(), "")]


@pytest.mark.parametrize("options", [(), ("-u",)])
def test_a_line_of_several_pieces_is_one_write(options: tuple[str, ...]) -> None:
    ours = f"from trainer.cluster.output import write_whole_lines; write_whole_lines(); {PRINTS}"
    assert writes_of(ours, *options) == ["loss 0.5\n", "of all\n", "warning 1\n"]


def test_a_traceback_is_one_write_and_the_line_behind_it_another() -> None:
    traceback, line = writes_of(FAILS, "-u")
    assert traceback.startswith("Traceback")
    assert traceback.endswith("ZeroDivisionError: division by zero\n")
    assert line == "trainer: ZeroDivisionError: division by zero\n"


def test_streams_that_something_else_has_put_there_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    output.write_whole_lines()

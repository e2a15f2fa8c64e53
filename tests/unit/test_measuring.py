"""Running a job to its end: its output, and interrupts meanwhile."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from measuring import INTERRUPTS, Finished, interrupt_on, run


def finished(stdout: str = "", stderr: str = "") -> Finished:
    return Finished(code=1, stdout=stdout, stderr=stderr, seconds=1.0)


def test_the_last_line_is_the_one_that_means_something() -> None:
    ours = "trainer: the loss turned nan\nERROR failed (exitcode: 1)\n=========\n"
    assert finished(stderr=ours).last_line == "trainer: the loss turned nan"
    joined = "trainer: 2 ranks on a: 2; DDP over Gloo, rank 0 of 2 on a (cpu)"
    assert finished(stderr=f"{joined}\nno such file\n---").last_line == "no such file"
    assert finished(stdout="usage: x\n").last_line == "usage: x"
    assert finished().problem == "exit code 1: no output"


@pytest.mark.parametrize("mark", ["[1,0]<stderr>:", "[0]<stderr>:"])
def test_a_line_is_without_its_ranks_mark(mark: str) -> None:
    script = f"import sys; sys.exit({mark + 'trainer: the loss turned nan'!r} + chr(10) + 'ended')"
    assert run([sys.executable, "-c", script], env=os.environ, timeout_s=20).last_line == "trainer: the loss turned nan"


@pytest.mark.distributed
def test_a_job_that_is_ended_may_print_more_than_a_pipe_holds() -> None:
    """Its output is read while it ends; otherwise it would block on the full pipe and be killed."""
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (sys.stderr.write('x' * 500_000 + chr(10) + 'bye'), sys.exit(3)))\n"
        "time.sleep(60)"
    )
    done = run([sys.executable, "-c", script], env=os.environ, timeout_s=2.0)
    assert done.code is None
    assert done.last_line == "bye"


@pytest.mark.parametrize(("rest", "code"), [("; exit 3", 3), ("; sleep 60", None)])
def test_a_survivor_that_keeps_the_pipes_open_is_not_waited_for(rest: str, code: int | None, tmp_path: Path) -> None:
    """It has another environment, so it is not found; the output is what has come by then."""
    pid = tmp_path / "pid"
    try:
        script = f"env -i sh -c 'echo $$ > {pid}; exec sleep 30' & echo said{rest}"
        done = run(["sh", "-c", script], env=os.environ, timeout_s=1.0)
        assert (done.code, done.stdout) == (code, "said\n")
        assert done.seconds < 8
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


@pytest.mark.distributed
def test_an_interrupt_while_a_job_is_ended_is_raised_afterwards(tmp_path: Path) -> None:
    earlier = {number: signal.getsignal(number) for number in INTERRUPTS}
    script = (
        "import os, pathlib, signal, sys, time\n"
        "def end(*_):\n"
        "    os.kill(os.getppid(), signal.SIGHUP)\n"
        "    time.sleep(0.5)\n"  # an interrupt that is raised at once would find no file
        "    pathlib.Path(sys.argv[1]).touch()\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "time.sleep(60)"
    )
    interrupt_on(*INTERRUPTS)
    try:
        with pytest.raises(KeyboardInterrupt):
            run([sys.executable, "-c", script, str(tmp_path / "ended")], env=os.environ, timeout_s=2.0)
        assert (tmp_path / "ended").exists()
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)

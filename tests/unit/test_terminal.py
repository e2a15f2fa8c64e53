"""The bar on a job's terminal: found behind the launcher, below what is printed, and gone when the job is."""

from __future__ import annotations

import os
import signal
import struct
import sys
import termios
from fcntl import ioctl
from pathlib import Path

import pytest

from tests.distributed.harness import ROOT
from tests.screen import Screen, Session, run_on_terminal

# Passes on what its child writes, as mpirun does; as a script, of which only the name says that it is a launcher.
LAUNCHER = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, process_group=0)
while text := os.read(child.stdout.fileno(), 1000):
    sys.stderr.write(text.decode())
    sys.stderr.flush()
sys.exit(child.wait() < 0)
"""
# Shows a bar at 0, 10, … 90 % and prints lines in between, some of them several at once.
RANK = """
import os, sys
from trainer.report.display import Display
display = Display(0.0)
for step in range(10):
    display.show("epoch 1/2", step, 10, ["loss 0.5"])
    print("\\n".join(f"line {step}.{part}" for part in range(1 + step % 3)), flush=True)
    if len(sys.argv) > 1:
        os.kill(os.getpid(), int(sys.argv[1]))
display.clear()
print("the end")
"""
PRINTED = [f"line {step}.{part}" for step in range(10) for part in range(1 + step % 3)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("mpirun", "collect"):
        (tmp_path / name).write_text(LAUNCHER)
    (tmp_path / "rank.py").write_text(RANK)
    return tmp_path


def run(folder: Path, *arguments: str, shell: str = "", screen: Screen | None = None) -> Session:
    command = [sys.executable, *arguments]
    if shell:
        command = ["sh", "-c", f'"$@" {shell}', "sh", *command]
    return run_on_terminal(command, screen=screen, cwd=folder, env={"PYTHONPATH": str(ROOT)})


def percents(session: Session) -> list[str]:
    return [
        line.split("%")[0][-3:].strip() for line in session.screen.bottom_lines if "epoch 1/2" in line and "|" in line
    ]


@pytest.mark.parametrize("arguments", [("rank.py",), ("mpirun", "rank.py"), ("mpirun", "mpirun", "rank.py")])
def test_a_bar_is_drawn_below_the_lines_and_tears_none(folder: Path, arguments: tuple[str, ...]) -> None:
    session = run(folder, *arguments)
    assert percents(session)[-1] == "90"
    assert [line for line in session.screen.text() if line] == [*PRINTED, "the end"]
    assert (session.screen.top, session.screen.bottom) == (0, session.screen.lines - 1)


def test_a_screen_that_is_full_already_gets_a_free_line_for_it(folder: Path) -> None:
    (folder / "rank.py").write_text(f"print('\\n'.join(map(str, range(30))))\n{RANK}")
    session = run(folder, "rank.py")
    assert percents(session)[-1] == "90"
    assert [line for line in session.screen.text() if line] == [*map(str, range(30)), *PRINTED, "the end"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_terminal_is_as_before_when_the_rank_is_killed(folder: Path, number: signal.Signals) -> None:
    session = run(folder, "mpirun", "rank.py", str(int(number)))
    assert session.code == 1
    assert percents(session) == ["0"]
    assert session.screen.last_line() == ""
    assert (session.screen.top, session.screen.bottom) == (0, session.screen.lines - 1)


@pytest.mark.parametrize(
    ("arguments", "shell"),
    [
        (("rank.py",), "2> log"),
        (("mpirun", "rank.py"), "2> log"),
        (("mpirun", "rank.py"), "2>&1 | cat"),
        (("collect", "rank.py"), ""),
        (("mpirun", "collect", "rank.py"), ""),
    ],
    ids=" ".join,
)
def test_output_that_ends_elsewhere_gets_lines(folder: Path, arguments: tuple[str, ...], shell: str) -> None:
    session = run(folder, *arguments, shell=shell)
    log = folder / "log"
    printed = [*session.screen.text(), *(log.read_text().splitlines() if log.exists() else [])]
    assert percents(session) == []
    assert "epoch 1/2  3/10  loss 0.5" in printed
    assert "the end" in printed


@pytest.mark.parametrize("variable", ["TERM=dumb", "TQDM_DISABLE=1"])
def test_a_bar_can_be_declined(folder: Path, variable: str) -> None:
    session = run(folder, "-c", f"import os, sys; os.execvp('env', ['env', '{variable}', sys.executable, 'rank.py'])")
    assert percents(session) == []
    assert "epoch 1/2  3/10  loss 0.5" in session.screen.text()


@pytest.mark.parametrize(("columns", "lines"), [(15, 12), (100, 3)])
def test_a_terminal_without_a_place_for_it_gets_lines(folder: Path, columns: int, lines: int) -> None:
    session = run(folder, "rank.py", screen=Screen(columns, lines))
    assert percents(session) == []
    assert "the end" in session.screen.text()


def test_a_job_in_the_background_leaves_the_terminal_to_the_shell(folder: Path) -> None:
    # A shell with job control gives what it starts in the background a process group of its own.
    session = run_on_terminal(
        ["sh", "-mc", f'"{sys.executable}" rank.py & wait'], cwd=folder, env={"PYTHONPATH": str(ROOT)}
    )
    assert percents(session) == []
    assert "epoch 1/2  3/10  loss 0.5" in session.screen.text()


def test_a_rank_of_a_terminal_that_stops_background_writes_is_not_stopped(folder: Path) -> None:
    script = (
        "import os, sys; os.system('stty tostop'); os.execvp(sys.executable, [sys.executable, 'mpirun', 'rank.py'])"
    )
    session = run(folder, "-c", script)
    assert percents(session)[-1] == "90"


def test_the_bar_follows_a_change_of_the_terminals_size(folder: Path) -> None:
    (folder / "rank.py").write_text(RANK.replace("print(", "input() if step == 4 else 0; print(", 1))
    small = Screen(lines=8)

    def resize(session: Session, terminal: int) -> None:
        if percents(session)[-1:] == ["40"] and session.screen is not small:
            session.screen = small
            ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 8, 100, 0, 0))
            os.write(terminal, b"\n")

    session = run_on_terminal([sys.executable, "rank.py"], cwd=folder, env={"PYTHONPATH": str(ROOT)}, on_change=resize)
    assert percents(session)[-1] == "90"
    assert small.text()[-1] == "the end"
    assert [line for line in small.text() if line.startswith("line 9")] == ["line 9.0"]

"""What ranks print, behind horovodrun: any byte, and a reader that takes none of them (patch 0029)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HOROVODRUN = Path(sys.executable).with_name("horovodrun")
MARK = re.compile(rb"\[(?:1,)?[01]\]<std(?:out|err)>:")
CONTROLLERS = pytest.mark.parametrize("controller", ["--mpi", "--gloo"])
# No UTF-8, a NUL, a character in two writes, more than a pipe holds in one line, and a last line without an end.
ODD = b"a\xff\xfeb\n\0\n\xc3" + b"\xa9\r50 %\r\n" + b"x" * 300_000 + b"\nlast"
PRINT_ODD = """
import os, sys
data = b"a\\xff\\xfeb\\n\\0\\n\\xc3", b"\\xa9\\r50 %\\r\\n" + b"x" * 300_000 + b"\\nlast"
for number in map(int, sys.argv[1:]):
    for part in data:
        while part:
            part = part[os.write(number, part):]
"""


def command(controller: str, *words: str, ranks: int = 1) -> list[str]:
    return [str(HOROVODRUN), controller, "-np", str(ranks), *words]


def in_shell(redirection: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    shell = ["sh", "-c", f'"$@" {redirection}', "sh", *words]
    return subprocess.run(shell, capture_output=True, timeout=60, env={**os.environ, "LC_ALL": "C"})


@CONTROLLERS
def test_any_byte_is_passed_on(controller: str) -> None:
    done = in_shell("", *command(controller, sys.executable, "-c", PRINT_ODD, "1", "2"))
    assert (done.returncode, MARK.sub(b"", done.stdout), MARK.sub(b"", done.stderr)) == (0, ODD, ODD)


@CONTROLLERS
def test_a_full_disk_takes_nothing_and_the_job_goes_on(controller: str) -> None:
    printing = command(controller, sys.executable, "-c", PRINT_ODD, "1", ranks=2)
    done = in_shell("> /dev/full", *printing)
    assert done.returncode == 0
    if controller == "--gloo":
        assert done.stderr.splitlines() == [
            b"horovodrun: cannot write to <stdout>: No space left on device; the job goes on, and output is lost"
        ]
    assert in_shell("2> /dev/full", *printing).stdout.count(b"last") == 2


@CONTROLLERS
def test_a_job_whose_reader_has_gone_ends_like_other_programs(controller: str) -> None:
    loop = "i=0; while [ $i -lt 300 ]; do echo $i; i=$((i+1)); sleep 0.1; done"
    process = subprocess.Popen(
        command(controller, "sh", "-c", loop, ranks=2), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate(timeout=20)
    # Open MPI's mpirun may crash as its output goes (1 run in 6, seen on a busy host).
    assert process.returncode in ((141,) if controller == "--gloo" else (141, 139))
    if controller == "--gloo":
        assert errors == b"horovodrun: ended, as nobody reads the output any more\n"


@CONTROLLERS
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_an_empty_one(controller: str, closed: str) -> None:
    script = "import sys; sys.exit(5 + len(sys.stdin.read()) + (print('out') or print('err', file=sys.stderr) or 0))"
    done = in_shell(closed, *command(controller, sys.executable, "-c", script))
    assert done.returncode == 5, done.stderr
    assert (b"out" in done.stdout, b"err" in done.stderr) == (" >" not in f" {closed}", "2>" not in closed)

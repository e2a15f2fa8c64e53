"""Starting Horovod: for an ordinary user, on hosts that differ, and with options that look like its own."""

from __future__ import annotations

import json
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.distributed.harness import BIN, run_job

RANK_LINE = (
    "import horovod.torch as hvd; hvd.init(); print(f'rank {hvd.rank()} of {hvd.size()} mpi={hvd.mpi_enabled()}')"
)


@pytest.mark.needs("root")  # which alone can become somebody else
@pytest.mark.parametrize("controller", ["--mpi", pytest.param("--gloo", marks=pytest.mark.slow)])
def test_both_controllers_start_for_an_ordinary_user(controller: str) -> None:
    home = Path(tempfile.mkdtemp(prefix="trainer-user-"))  # pytest's own folders are closed to other users
    shutil.chown(home, "nobody")
    # Root's Python often lies under root's home. Being allowed to read there makes nobody no less ordinary
    # to Open MPI; but mpirun looks at the mode of the program that it starts, hence the shell.
    readable = "+dac_read_search"
    user = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
    user += [f"--inh-caps={readable}", f"--ambient-caps={readable}"]
    program = f"exec {shlex.quote(str(BIN / 'python'))} -c {shlex.quote(RANK_LINE)}"
    try:
        done = subprocess.run(
            [*user, str(BIN / "horovodrun"), controller, "-np", "2", "sh", "-c", program],
            env={"PATH": f"{BIN}:/usr/bin:/bin", "HOME": str(home), "TMPDIR": str(home)},
            cwd=home, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    finally:
        shutil.rmtree(home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("of 2 mpi=") == 2


_THREADS = """
import ctypes, os, struct
import horovod.torch as hvd

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}[os.uname().machine]

def slice_ns(thread):
    attributes = ctypes.create_string_buffer(56)
    ctypes.CDLL(None).syscall(SCHED_GETATTR, thread, attributes, 56, 0)
    return struct.unpack_from("<Q", attributes, 24)[0]

def slack_ns(thread):
    try:
        with open(f"/proc/{thread}/timerslack_ns") as file:
            return int(file.read())
    except PermissionError:  # another thread's takes a right that not every container has
        return 1000

before = {int(name) for name in os.listdir("/proc/self/task")}
own = slice_ns(0), slack_ns(os.getpid())
hvd.init()
made = {int(name) for name in os.listdir("/proc/self/task")} - before
print(f"made {sorted({(slice_ns(one), slack_ns(one)) for one in made})}")
print(f"own is {'kept' if own == (slice_ns(0), slack_ns(os.getpid())) else 'changed'}")
"""


@pytest.mark.parametrize("launcher", ["horovodrun-mpi", pytest.param("horovodrun-gloo", marks=pytest.mark.slow)])
def test_horovods_threads_run_soon_after_they_wake_and_the_scripts_own_are_left_alone(launcher: str) -> None:
    outcome = run_job(launcher, 2, ["-c", _THREADS], timeout_s=60)
    assert outcome.code == 0, outcome.output
    # Before Linux 6.12 there are no slices to ask for, and 0 is read.
    version = re.match(r"(\d+)\.(\d+)", platform.release())
    slice_ns = 100_000 if version and (int(version[1]), int(version[2])) >= (6, 12) else 0
    assert outcome.output.count(f"made [({slice_ns}, 1000)]") == 2, outcome.output
    assert outcome.output.count("own is kept") == 2


def test_a_scripts_own_options_reach_it_whatever_they_begin_with() -> None:
    """One of our patches; a Horovod without them takes `--network` for its `--network-interfaces`."""
    show = "import sys, json; print('args ' + json.dumps(sys.argv[1:]))"
    outcome = run_job("horovodrun-gloo", 1, ["-c", show, "--network", "tutorial", "--verb", "--hosts", "x"])
    line = next(line for line in outcome.output.splitlines() if "args " in line)
    assert json.loads(line.split("args ", 1)[1]) == ["--network", "tutorial", "--verb", "--hosts", "x"]

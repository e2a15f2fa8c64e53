"""Starting Horovod: for an ordinary user, on hosts that differ, and with options that look like its own."""

from __future__ import annotations

import json
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


def test_a_scripts_own_options_reach_it_whatever_they_begin_with() -> None:
    """One of our patches; a Horovod without them takes `--network` for its `--network-interfaces`."""
    show = "import sys, json; print('args ' + json.dumps(sys.argv[1:]))"
    outcome = run_job("horovodrun-gloo", 1, ["-c", show, "--network", "tutorial", "--verb", "--hosts", "x"])
    line = next(line for line in outcome.output.splitlines() if "args " in line)
    assert json.loads(line.split("args ", 1)[1]) == ["--network", "tutorial", "--verb", "--hosts", "x"]

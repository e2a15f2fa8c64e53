"""What holds for Horovod alone, in real jobs over MPI and over Gloo."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.distributed import checks_horovod
from tests.distributed.harness import BIN, Checks, run_checks, run_job

CHECKS = [name for name in vars(checks_horovod) if name.startswith("check_")]
pytestmark = pytest.mark.distributed

RANK_LINE = (
    "import horovod.torch as hvd; hvd.init(); print(f'rank {hvd.rank()} of {hvd.size()} mpi={hvd.mpi_enabled()}')"
)


@cache
def job(launcher: str, ranks: int) -> Checks:
    return run_checks("tests.distributed.checks_horovod", launcher, ranks)


@pytest.mark.parametrize(("launcher", "ranks"), [("horovodrun-mpi", 2), ("horovodrun-mpi", 4), ("horovodrun-gloo", 2)])
@pytest.mark.parametrize("check", CHECKS)
def test_horovod(launcher: str, ranks: int, check: str) -> None:
    checks = job(launcher, ranks)
    outcomes = [report.get(check, f"did not get this far\n{checks.outcome.output}") for report in checks.by_rank]
    assert outcomes == ["passed"] * ranks, "\n".join(outcomes)


@pytest.mark.parametrize(("launcher", "mpi"), [("horovodrun-mpi", True), ("horovodrun-gloo", False)])
def test_both_controllers_start_with_nothing_exported(launcher: str, mpi: bool) -> None:
    outcome = run_job(launcher, 2, ["-c", RANK_LINE])
    assert outcome.code == 0, outcome.output
    for rank in (0, 1):
        assert f"rank {rank} of 2 mpi={mpi}" in outcome.output


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else; this run is an ordinary user's")
@pytest.mark.parametrize("controller", ["--mpi", "--gloo"])
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


def test_ranks_meet_that_were_told_different_things_about_their_cores() -> None:
    """Hosts differ: on one of them Open MPI is told to yield, on the other it is not."""
    script = (
        "import os; os.environ['OMPI_MCA_mpi_yield_when_idle'] = os.environ['OMPI_COMM_WORLD_RANK']\n"
        "import torch, horovod.torch as hvd; hvd.init()\n"
        "sums = [hvd.allreduce(torch.ones(1), op=hvd.Sum, name='x').item() for _ in range(3)]\n"
        "print(f'sums {sums}')"  # one piece, because what several ranks print mixes between the pieces
    )
    outcome = run_job("mpirun", 2, ["-c", script], timeout_s=60)
    assert outcome.code == 0, outcome.output
    assert outcome.output.count("sums [2.0, 2.0, 2.0]") == 2


def test_installed_horovod_is_the_one_with_our_patches() -> None:
    """The script's own options reach it, whatever they begin with."""
    show = "import sys, json; print('args ' + json.dumps(sys.argv[1:]))"
    outcome = run_job("horovodrun-gloo", 1, ["-c", show, "--network", "tutorial", "--verb", "--hosts", "x"])
    line = next(line for line in outcome.output.splitlines() if "args " in line)
    assert json.loads(line.split("args ", 1)[1]) == ["--network", "tutorial", "--verb", "--hosts", "x"]

"""A running job listens where docs/security.md says, and nowhere else."""

from __future__ import annotations

import re
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

from tests.distributed.harness import ROOT, command_for, processes_of, program
from tests.security.running import Running, elastic, function, listening, running

SCRIPT = str(Path(__file__).with_name("job_that_waits.py"))
# The jobs of the table's third column that each of these is.
JOBS = {
    "horovodrun-gloo horovod": {"gloo"},
    "horovodrun-gloo ddp": {"gloo", "ddp"},
    "horovodrun-mpi horovod": {"mpi"},
    "mpirun parameter_server": {"mpi", "parameter server"},
    "torchrun ddp": {"torchrun", "ddp"},
    "torchrun parameter_server": {"torchrun", "parameter server"},
    "elastic": {"elastic"},
    "function": {"function"},
    "hosts": {"torchrun", "ddp", "hosts"},
}


def two_hosts(script: str) -> list[str]:
    """The command of a job on two hosts; the second is this one with processes of its own, as a container has them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    node = f"{program('torchrun')} --nnodes 2 --nproc-per-node 1 --rdzv-backend static --master-addr 127.0.0.1"
    node += f" --master-port {port} --node-rank"
    second = f"unshare --pid --fork --mount-proc {node} 1 {script} ddp"
    return ["sh", "-c", f"{node} 0 {script} ddp & {second} && wait $!"]


def table() -> list[tuple[str, str, set[str]]]:
    """Process, kind of address and jobs of every row of the table of ports."""
    text = (ROOT / "docs" / "security.md").read_text().split("## The ports of a job")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [(row[0], row[1], set(row[2].split(", "))) for row in rows[2:]]


def process_name(process: psutil.Process) -> str:
    """The name in the table's first column."""
    line = " ".join(process.cmdline())
    for pattern, name in (
        (r"parameter_server/server\.py", "parameter server"),
        (r"trainer\.hang\.watcher", "watcher"),
        (r"(^|/)mpirun ", "mpirun"),
        (r"bin/torchrun ", "torchrun"),
        (r"bin/horovodrun |tests\.security\.functions", "horovodrun"),
    ):
        if re.search(pattern, line):
            return name
    return "rank"


def kind_of(address: str) -> str:
    """The kind of address in the table's second column, for a job on this host alone."""
    bare = address.removeprefix("::ffff:")
    if bare in ("0.0.0.0", "::"):  # noqa: S104 (what must not be, but for Open MPI and torchrun)
        return "all"
    # Where all ranks are on one host, Gloo in PyTorch takes the address of the host's own name.
    return "job" if bare.startswith("127.") or bare == socket.gethostbyname(socket.gethostname()) else bare


def found_in(job: Running) -> set[tuple[str, str]]:
    return {
        (process_name(process), kind_of(address))
        for process in processes_of(job.mark)
        for address, _ in listening(process)
    }


def rows_for(jobs: Iterable[str], others: str = "") -> set[tuple[str, str]]:
    return {(process, address) for process, address, where in table() if where & {f"{job}{others}" for job in jobs}}


def command(name: str, folder: Path) -> list[str]:
    if name == "elastic":
        return elastic(folder, sys.executable, SCRIPT, "elastic")
    if name == "function":
        return function("ready")
    if name == "hosts":
        return two_hosts(SCRIPT)
    launcher, strategy = name.split()
    return command_for(launcher, 2, [SCRIPT, strategy])


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.needs("root")] if name == "hosts" else []) for name in JOBS]
)
def test_a_job_listens_where_the_table_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAIT_FOR", str(tmp_path / "go"))
    with running(command(name, tmp_path)) as job:
        ranks, deadline = 1 if name == "elastic" else 2, time.monotonic() + 120
        while job.text().count("ready") < ranks and job.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert job.text().count("ready") == ranks, job.text()
        found = found_in(job)
        (tmp_path / "go").touch()
        assert job.process.wait(60) == 0, job.text()
    # What is open at the start only may be seen or not.
    assert rows_for(JOBS[name]) <= found <= rows_for(JOBS[name]) | rows_for(JOBS[name], " (start)")


def test_every_row_is_of_a_job_that_is_looked_at() -> None:
    known = {one for jobs in JOBS.values() for one in jobs}
    named = {one.removesuffix(" (start)") for _, _, jobs in table() for one in jobs}
    assert named <= known
    assert known - named == set()


def test_only_what_is_not_ours_listens_everywhere() -> None:
    assert {process for process, address, _ in table() if address == "all"} == {"mpirun", "torchrun", "rank"}
    assert all(jobs == {"mpi"} for process, address, jobs in table() if (process, address) == ("rank", "all"))

"""A running job listens where docs/security.md says, and nowhere else."""

from __future__ import annotations

import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import psutil
import pytest

from tests.distributed.harness import ROOT, command_for, processes_of, program
from tests.security.running import Running, listening, running

SCRIPT = str(Path(__file__).with_name("job_that_waits.py"))
# The jobs of the table's fourth column that each of these is.
JOBS = {
    "horovodrun-gloo horovod": {"gloo"},
    "horovodrun-gloo ddp": {"gloo", "ddp"},
    "horovodrun-gloo parameter_server": {"gloo", "parameter server"},
    "horovodrun-mpi horovod": {"mpi"},
    "mpirun ddp": {"mpi", "ddp"},
    "mpirun parameter_server": {"mpi", "parameter server"},
    "torchrun ddp": {"torchrun", "torchrun with c10d", "ddp"},
    "torchrun parameter_server": {"torchrun", "torchrun with c10d", "parameter server"},
    "supervised ddp": {"mpi", "ddp"},
    "supervised-torchrun ddp": {"torchrun", "ddp"},
    "hosts": {"torchrun", "ddp", "hosts"},
}
# Others look at each of their rows.
SLOW = {
    *("horovodrun-gloo parameter_server", "torchrun parameter_server", "horovodrun-gloo ddp", "mpirun ddp"),
    *("supervised ddp", "supervised-torchrun ddp"),
}


@dataclass(frozen=True)
class Row:
    """A row of the table of ports."""

    process: str
    address: str
    ports: str
    jobs: frozenset[str]

    def count(self, ranks: int) -> int:
        number, _, each = self.ports.partition(" ")
        return int(number) * (ranks if each == "a rank" else 1)


def two_hosts(script: str) -> list[str]:
    """The command of a job on two hosts; the second is this one with processes of its own, as a container has them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    node = f"{program('torchrun')} --nnodes 2 --nproc-per-node 1 --rdzv-backend static --master-addr 127.0.0.1"
    node += f" --master-port {port} --node-rank"
    second = f"unshare --pid --fork --mount-proc {node} 1 {script} ddp"
    return ["sh", "-c", f"{node} 0 {script} ddp & {second} && wait $!"]


def table() -> list[Row]:
    text = (ROOT / "docs" / "security.md").read_text().split("## The ports of a job")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [Row(row[0], row[1], row[2], frozenset(row[3].split(", "))) for row in rows[2:]]


def process_name(process: psutil.Process) -> str:
    """The name in the table's first column."""
    line = " ".join(process.cmdline())
    for pattern, name in (
        (r"parameter_server/server\.py", "parameter server"),
        (r"trainer\.ops\.watch", "watcher"),
        (r"(^|/)mpirun ", "mpirun"),
        (r"bin/torchrun | torch\.distributed\.run ", "torchrun"),
        (r"bin/horovodrun ", "horovodrun"),
    ):
        if re.search(pattern, line):
            return name
    return "rank"


def kind_of(address: str) -> str:
    """The kind of address in the table's second column, for a job on this host alone."""
    bare = address.removeprefix("::ffff:")
    if bare in ("0.0.0.0", "::"):  # noqa: S104 (what must not be, but for Open MPI and torchrun)
        return "all"
    return "job" if bare.startswith("127.") else bare


def found_in(job: Running) -> Counter[tuple[str, str]]:
    """How many ports there are of each process and kind of address."""
    found: Counter[tuple[str, str]] = Counter()
    for process in processes_of(job.mark):
        for kind, addresses in groupby(sorted(listening(process), key=to_kind), to_kind):
            # A port for each version of IP, where there are both, counts as one.
            found[process_name(process), kind] += max(Counter(":" in address for address, _ in addresses).values())
    return found


def to_kind(place: tuple[str, int]) -> str:
    return kind_of(place[0])


def expected(jobs: Iterable[str], ranks: int) -> Counter[tuple[str, str]]:
    rows = [row for row in table() if row.jobs & set(jobs)]
    return sum((Counter({(row.process, row.address): row.count(ranks)}) for row in rows), Counter())


def command(name: str) -> list[str]:
    if name == "hosts":
        return two_hosts(SCRIPT)
    launcher, strategy = name.split()
    if launcher.startswith("supervised"):
        by_torchrun = ["--torchrun"] if "torchrun" in launcher else []
        return [sys.executable, "-m", "trainer", "run", "-np", "2", *by_torchrun, sys.executable, SCRIPT, strategy]
    return command_for(launcher, 2, [SCRIPT, strategy])


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=[*[pytest.mark.slow] * (one in SLOW), *[pytest.mark.needs("root")] * (one == "hosts")])
        for one in JOBS
    ],
)
def test_a_job_listens_where_the_table_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAIT_FOR", str(tmp_path / "go"))
    with running(command(name), folder=tmp_path) as job:
        ranks, deadline = 2, time.monotonic() + 120
        while job.text().count("ready") < ranks and job.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert job.text().count("ready") == ranks, job.text()
        found = found_in(job)
        # Where the host's own name is one for the loopback address, its ports do not show it. On several hosts whose
        # MASTER_ADDR is a loopback address, Gloo chooses by itself.
        is_chosen = "ddp" in JOBS[name] and "hosts" not in JOBS[name]
        assert job.text().count("interface of Gloo: lo.") == (ranks if is_chosen else 0), job.text()
        (tmp_path / "go").touch()
        assert job.process.wait(60) == 0, job.text()
    always = expected(JOBS[name], ranks)
    assert always <= found
    # What is open at the start only may be seen or not.
    assert (found - always).keys() <= expected({f"{job} (start)" for job in JOBS[name]}, ranks).keys()


def test_every_row_is_of_a_job_that_is_looked_at() -> None:
    known = {one for jobs in JOBS.values() for one in jobs}
    named = {one.removesuffix(" (start)") for row in table() for one in row.jobs}
    assert named == known
    quick = {one for name, jobs in JOBS.items() if name not in SLOW for one in jobs}
    assert quick == known


def test_only_what_is_not_ours_listens_everywhere() -> None:
    everywhere = [row for row in table() if row.address == "all"]
    assert {row.process for row in everywhere} == {"mpirun", "torchrun", "rank"}
    assert all(row.jobs == {"mpi"} for row in everywhere if row.process == "rank")

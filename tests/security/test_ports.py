"""A running job listens where docs/security.md says, and nowhere else, and shows its secrets to nobody."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

import psutil
import pytest

from tests.distributed.harness import ROOT, command_for, on_two_hosts, processes_of
from tests.security.running import Running, listening, running

SCRIPT = str(Path(__file__).with_name("job_that_waits.py"))
# The jobs of the table's fourth column that each of these is.
JOBS = {
    "horovodrun-gloo horovod": {"every", "gloo"},
    "horovodrun-mpi parameter_server": {"every", "mpi", "parameter server"},
    "torchrun ddp": {"every", "torchrun", "torchrun with c10d"},
    "supervised ddp": {"every", "mpi"},
    "hosts": {"every", "torchrun"},
}
# Of the ports of the slow ones, the others lack the parameter server's alone.
MARKS = {"horovodrun-mpi parameter_server": [pytest.mark.slow], "hosts": [pytest.mark.slow, pytest.mark.needs("root")]}
SECRETS = {"HOROVOD_JOB_SECRET": 64, "HOROVOD_RENDEZVOUS_KEY": 32, "TRAINER_SECRET": 64}
"""What a job has of its own, and how many hexadecimal digits that are."""
HAS = {
    "horovodrun-gloo horovod": ["HOROVOD_JOB_SECRET", "HOROVOD_RENDEZVOUS_KEY"],
    "horovodrun-mpi parameter_server": ["HOROVOD_JOB_SECRET"],
    "supervised ddp": ["HOROVOD_JOB_SECRET", "TRAINER_SECRET"],
}
RANKS = 2


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
        return on_two_hosts(f"{SCRIPT} ddp")
    launcher, strategy = name.split()
    if launcher == "supervised":
        return [sys.executable, "-m", "trainer", "run", "-np", "2", sys.executable, SCRIPT, strategy]
    return command_for(launcher, 2, [SCRIPT, strategy])


@dataclass(frozen=True)
class Seen:
    """What a job has shown while all its ranks were there, and by its end."""

    ports: Counter[tuple[str, str]]
    environments: list[dict[str, str]]
    lines: list[str]
    """The command lines of its processes."""
    said: str


Look = Callable[[str], Seen]


@pytest.fixture(scope="module")
def look(tmp_path_factory: pytest.TempPathFactory) -> Look:
    """Runs a job, once, and looks at it."""

    @cache
    def run(name: str) -> Seen:
        folder = tmp_path_factory.mktemp("job")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WAIT_FOR", str(folder / "go"))
            with running(command(name), folder=folder) as job:
                deadline = time.monotonic() + 120
                while job.text().count("ready") < RANKS and job.process.poll() is None and time.monotonic() < deadline:
                    time.sleep(0.1)
                assert job.text().count("ready") == RANKS, job.text()
                processes = processes_of(job.mark)
                ports, environments = found_in(job), [process.environ() for process in processes]
                lines = [" ".join(process.cmdline()) for process in processes]
                (folder / "go").touch()
                assert job.process.wait(60) == 0, job.text()
                return Seen(ports, environments, lines, job.text())

    return run


@pytest.mark.distributed
@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in JOBS])
def test_a_job_listens_where_the_table_says(name: str, look: Look) -> None:
    seen = look(name)
    # Where the host's own name is one for the loopback address, its ports do not show it. On several hosts whose
    # MASTER_ADDR is a loopback address, Gloo chooses by itself.
    is_chosen = name != "hosts"
    assert seen.said.count("interface of Gloo: lo.") == (RANKS if is_chosen else 0), seen.said
    always = expected(JOBS[name], RANKS)
    assert always <= seen.ports
    # What is open at the start only may be seen or not.
    assert (seen.ports - always).keys() <= expected({f"{job} (start)" for job in JOBS[name]}, RANKS).keys()


@pytest.mark.distributed
@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in HAS])
def test_the_secret_is_in_the_ranks_environment_and_on_no_command_line(name: str, look: Look) -> None:
    seen = look(name)
    secrets = {(one, values[one]) for values in seen.environments for one in SECRETS if one in values}
    assert sorted(one for one, _ in secrets) == HAS[name]
    for one, secret in secrets:
        assert len(secret) == SECRETS[one]
        assert not [line for line in seen.lines if secret in line]
        assert secret not in seen.said


@pytest.mark.distributed
def test_two_jobs_have_two_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those in the caller's environment are not taken over."""
    names = HAS["horovodrun-gloo horovod"]
    seen = ["ab" * 32, "ab" * 16]
    for name, secret in zip(names, seen, strict=True):
        monkeypatch.setenv(name, secret)
    for _ in range(2):
        code = f"import os; print('secrets', *(os.environ[name] for name in {names}))"
        with running(command_for("horovodrun-gloo", 1, ["-c", code])) as job:
            assert job.process.wait(60) == 0, job.text()
            seen += job.text().split("secrets ")[1].split()[:2]
    assert len(set(seen)) == len(seen)


def test_every_row_is_of_a_job_that_is_looked_at() -> None:
    known = {one for jobs in JOBS.values() for one in jobs}
    named = {one.removesuffix(" (start)") for row in table() for one in row.jobs}
    assert named == known

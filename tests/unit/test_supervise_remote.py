"""Find a job's processes, send them signals and kill them, on this host and through a program in place of ssh."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainer.ops.supervise.hosts import Host
from trainer.ops.supervise.remote import on_all_hosts
from trainer.ops.verdict import JobVerdict
from trainer.watch.job_folder import folder_name

HERE, THERE = Host("localhost", 1), Host("elsewhere", 1)
# Takes the place of ssh: the command runs on this machine.
SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
[ "$1" = elsewhere ] || { echo "ssh: Could not resolve hostname $1" >&2; exit 255; }
shift
exec sh -c "$*"
"""
RANK = """
import signal, sys, time
from trainer.watch.heartbeat import report_join, report_step
from trainer.ops.verdict import JobVerdict, write_verdict
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75))
report_join(3)
report_step(12, is_new=True)
write_verdict(JobVerdict("hang", "why", (1, 3)))
print(flush=True)
time.sleep(60)
"""

Start = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture(autouse=True)
def _ssh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "ssh"
    fake.parent.mkdir()
    fake.write_text(SSH)
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started = []

    def start(job: str) -> subprocess.Popen[bytes]:
        on_all_hosts([HERE], job, "make")
        environment = {**os.environ, "TRAINER_JOB": job, "TMPDIR": str(tmp_path)}
        process = subprocess.Popen([sys.executable, "-c", RANK], env=environment, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("host", [HERE, THERE])
def test_a_job_s_processes_are_killed_and_its_files_read_and_removed(start: Start, host: Host, tmp_path: Path) -> None:
    rank, other = start("one"), start("other")
    (looked,) = on_all_hosts([host], "one", "look")
    (answer,) = on_all_hosts([host], "one", "kill")
    assert rank.wait(timeout=10) == -signal.SIGKILL
    assert other.poll() is None
    assert (looked.processes, looked.verdict) == (answer.processes, answer.verdict)
    assert answer.verdict == JobVerdict("hang", "why", (1, 3))
    assert (answer.host, answer.problem, answer.processes) == (host.name, "", frozenset({rank.pid}))
    assert [(rank.rank, rank.updates) for rank in answer.ranks] == [(3, 12)]
    assert [path.name for path in tmp_path.glob("trainer-*")] == [folder_name("other", os.geteuid())]
    assert on_all_hosts([host], "one", "look")[0].ranks == ()


@pytest.mark.parametrize("host", [HERE, THERE])
def test_the_job_s_folder_is_made_under_the_name_that_its_ranks_know(host: Host, tmp_path: Path) -> None:
    for _ in range(2):  # a host may have two names
        (made,) = on_all_hosts([host], "one", "make")
        assert (made.problem, made.full) == ("", "")
    (folder,) = tmp_path.glob("trainer-*")
    assert (folder.name, folder.stat().st_mode & 0o777) == (folder_name("one", os.geteuid()), 0o700)
    on_all_hosts([host], "one", "kill")
    assert not folder.exists()


@pytest.mark.needs("root")
def test_a_folder_of_another_user_s_and_one_without_room_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    monkeypatch.setenv("TMPDIR", str(full))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(full)], check=True)
    try:
        (full / "fill").write_bytes(bytes(4096))
        (made,) = on_all_hosts([HERE], "one", "make")
        assert (made.problem, made.full) == ("", f"{full}: No space left on device")
    finally:
        subprocess.run(["umount", str(full)], check=True)
    os.chown(tmp_path / folder_name("one", os.geteuid()), 65534, -1)
    monkeypatch.delenv("TMPDIR")
    (made,) = on_all_hosts([HERE], "one", "make")
    assert made.problem == f"the job's folder cannot be made: {tmp_path}: File exists"


def test_sigterm_is_noted_of_a_rank_that_handles_none(start: Start) -> None:
    rank, (before,) = start("one"), on_all_hosts([HERE], "one", "look")
    rank.terminate()
    assert rank.wait(timeout=10) == -signal.SIGTERM
    (after,) = on_all_hosts([THERE], "one", "kill")
    assert [[rank.signal for rank in answer.ranks] for answer in (before, after)] == [[0], [signal.SIGTERM]]


def test_a_host_that_cannot_be_reached_is_not_well() -> None:
    lost, here = on_all_hosts([Host("no-such-host", 1), HERE], "one", "look")
    assert (lost.problem, here.problem) == ("ssh: Could not resolve hostname no-such-host", "")


def test_a_host_without_ssh_to_reach_it_is_not_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "No such file" in on_all_hosts([THERE], "one", "look")[0].problem


# The second leaves a process that keeps its pipes open.
@pytest.mark.parametrize("hangs", ["exec sleep 60", "sleep 20; exit"])
def test_a_host_that_does_not_answer_takes_a_bounded_time(tmp_path: Path, hangs: str) -> None:
    (tmp_path / "bin" / "ssh").write_text(f"#!/bin/sh\n{hangs}\n")
    began = time.monotonic()
    (lost,) = on_all_hosts([THERE], "one", "look", timeout_s=0.5)
    assert lost.problem == "does not answer in time"
    assert time.monotonic() - began < 5

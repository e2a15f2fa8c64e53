"""Finding, signalling and killing a job's processes by its mark, here and through ssh."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from trainer.ops.supervise.hosts import Host
from trainer.ops.supervise.launchers import environment_for, through_ssh, torchrun
from trainer.ops.supervise.remote import on_all_hosts
from trainer.watch.job_folder import JobVerdict

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
from trainer.watch.heartbeat import report_join, report_update
from trainer.watch.job_folder import JobVerdict, write_verdict
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75))
report_join(3)
report_update(12)
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
    assert [path.name for path in tmp_path.glob("trainer-*")] == [f"trainer-{os.geteuid()}-other"]
    assert on_all_hosts([host], "one", "look")[0].ranks == ()


def test_sigterm_is_noted_of_a_rank_that_handles_none(start: Start) -> None:
    rank, (before,) = start("one"), on_all_hosts([HERE], "one", "look")
    rank.terminate()
    assert rank.wait(timeout=10) == -signal.SIGTERM
    (after,) = on_all_hosts([THERE], "one", "kill")
    assert [[rank.signal for rank in answer.ranks] for answer in (before, after)] == [[0], [signal.SIGTERM]]


def test_sigterm_of_a_rank_s_forked_child_is_not_noted(tmp_path: Path) -> None:
    script = """
import os, signal
from trainer.watch.heartbeat import report_join
report_join(3)
reader, writer = os.pipe()
if (child := os.fork()) == 0:
    os.write(writer, b"x")
    signal.pause()
os.read(reader, 1)
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
"""
    environment = {**os.environ, "TRAINER_JOB": "one", "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=30)
    (answer,) = on_all_hosts([HERE], "one", "kill")
    assert [(rank.rank, rank.signal) for rank in answer.ranks] == [(3, 0)]


def test_ranks_are_asked_to_save(start: Start) -> None:
    rank = start("one")
    on_all_hosts([THERE], "one", "preempt")
    assert rank.wait(timeout=10) == 75


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


def test_torchrun_has_one_agent_for_each_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/elsewhere")  # where this Python's programs are not
    environment = environment_for("one")
    assert environment["PATH"] == f"{Path(sys.executable).parent}:/elsewhere"
    (alone,) = torchrun([HERE], ["python", "train.py"], environment)
    assert alone.command[-7:] == ("--node-rank", "0", "--nproc-per-node", "1", "--", "python", "train.py")
    assert option(alone.command, "--master-addr") == "127.0.0.1"
    first, second = torchrun([Host("localhost", 2), THERE], ["python", "train.py"], environment)
    assert (option(first.command, "--node-rank"), option(first.command, "--nproc-per-node")) == ("0", "2")
    assert option(first.command, "--master-addr") == socket.gethostname()
    assert option(first.command, "--rdzv-backend") == "static", "another one loads pickles from its store"
    assert second.command[-2:] == ("elsewhere", "sh -s")
    assert "--node-rank 1" in second.script
    for name in ("--master-addr", "--master-port", "--rdzv-id", "--rdzv-backend"):
        assert f"{name} {option(first.command, name)} " in second.script


def option(command: Sequence[str], name: str) -> str:
    return command[command.index(name) + 1]


def on_elsewhere(*command: str) -> subprocess.Popen[bytes]:
    start = through_ssh(THERE, command, {**os.environ, "TRAINER_JOB": "it's one"})
    process = subprocess.Popen(start.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(start.script.encode())
    process.stdin.flush()
    return process


def test_a_command_on_another_host_has_the_environment_the_folder_and_its_own_exit_code() -> None:
    process = on_elsewhere("sh", "-c", 'echo "$TRAINER_JOB in $PWD"; exit 78')
    assert process.wait(timeout=10) == 78
    output, _ = process.communicate()
    assert output.decode() == f"it's one in {Path.cwd()}\n"


def test_a_command_on_another_host_ends_with_its_ssh() -> None:
    process = on_elsewhere("sh", "-c", 'trap "echo ended; exit 3" TERM; echo begun; while :; do sleep 0.1; done')
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    process.stdin.close()
    process.stdin = None
    assert process.communicate(timeout=10)[0] == b"ended\n"
    assert process.returncode == 3

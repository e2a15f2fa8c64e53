"""What horovodrun runs on every host: the choice of interfaces, and the process beside each rank."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest
from horovod.runner.common.util import settings as hvd_settings
from horovod.runner.driver import driver_service
from horovod.runner.gloo_run import network_variables
from horovod.runner.mpi_run import mpi_run
from horovod.runner.util import remote_exec, route, supervise
from horovod.runner.util.route import LAUNCHER, Interface, RoutedInterfaces

Running = subprocess.Popen[bytes]


@pytest.fixture
def routed() -> RoutedInterfaces:
    """Two hosts with other names for their interfaces in one subnet; the launcher is host a."""
    a, b = Interface("data0", "10.77.0.1", "10.77.0.0/24"), Interface("ens7", "10.77.0.2", "10.77.0.0/24")
    return RoutedInterfaces({LAUNCHER: {"b": a}, "a": {"b": a}, "b": {"a": b, LAUNCHER: b}}, ["a", "b"])


def mpirun_command(nics: set[str], env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    commands: list[str] = []

    def note(command: str, env: dict[str, str]) -> int:
        commands.append(command)
        return 0

    monkeypatch.setattr(supervise, "run", note)
    settings = hvd_settings.Settings(num_proc=2, hosts="a:1,b:1")
    with pytest.raises(SystemExit, match="0"):
        mpi_run(settings, nics, {**os.environ, **env}, ["true"])
    return commands[0]


def test_over_mpi_nccl_is_told_no_name_of_another_hosts_interface(
    routed: RoutedInterfaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "NCCL_SOCKET_IFNAME" not in mpirun_command(routed, {}, monkeypatch)
    eth0 = Interface("eth0", "10.77.0.1", "10.77.0.0/24")
    alike = RoutedInterfaces({LAUNCHER: {"b": eth0}, "a": {"b": eth0}, "b": {"a": eth0, LAUNCHER: eth0}}, ["a", "b"])
    assert " -x NCCL_SOCKET_IFNAME==eth0 " in mpirun_command(alike, {}, monkeypatch)
    assert " -x NCCL_SOCKET_IFNAME " in mpirun_command(alike, {"NCCL_SOCKET_IFNAME": "ib0"}, monkeypatch)


def test_nccls_interface_that_the_user_has_named_stays(
    routed: RoutedInterfaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert "NCCL_SOCKET_IFNAME" not in network_variables(routed, 1, "a")


def test_several_subnets() -> None:
    def job(a_name: str, b_name: str) -> RoutedInterfaces:
        a, b = Interface(a_name, "10.1.0.1", "10.1.0.0/24"), Interface(b_name, "10.2.0.1", "10.2.0.0/24")
        return RoutedInterfaces({LAUNCHER: {"b": a}, "a": {"b": a}, "b": {"a": b, LAUNCHER: b}}, ["a", "b"])

    assert job("eth0", "eth0").between_ranks() == "eth0"
    assert job("eth0", "ens7").between_ranks() == "10.1.0.0/24,10.2.0.0/24"
    assert job("eth0", "ens7").between_daemons() == "ens7,eth0"


def test_a_missing_route_names_both_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    good = Interface("data0", "10.77.0.1", "10.77.0.0/24")
    monkeypatch.setattr(driver_service, "resolve_host_address", lambda host: None)
    monkeypatch.setattr(route, "find_routes", lambda targets: dict.fromkeys(targets, good))

    def ask(host: str, targets: dict[str, Any], settings: object) -> dict[str, Any]:
        return {target: "Network is unreachable" if host == "b" and target == "c" else good for target in targets}

    monkeypatch.setattr(driver_service, "_ask_for_routes", ask)
    with pytest.raises(RuntimeError, match=r"^no route from host b to host c: Network is unreachable$"):
        driver_service.routed_interfaces(["a", "b", "c"], ["b", "c"], None)


@pytest.fixture
def beside() -> Iterator[list[Running]]:
    running: list[Running] = []
    yield running
    for process in running:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def start(
    beside: list[Running], command: str, env: dict[str, str] | None = None,
    arguments: tuple[str, str] = ("-m", "horovod.runner.util.remote_exec"),
) -> Running:  # fmt: skip
    process = subprocess.Popen([sys.executable, *arguments, "/"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    beside.append(process)
    assert process.stdin is not None
    process.stdin.write(remote_exec.encode(f"sh -c {shlex.quote(command)}", env or {}))
    process.stdin.flush()
    return process


def line_of(process: Running) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().rstrip("\n")


def test_the_environment_arrives_whole(beside: list[Running]) -> None:
    env = {"EMPTY": "", "LINES": "a\nb = c", "PATH": "/launcher:/usr/bin:/bin", "LONG": "x" * 100_000, "LAST": ""}
    seen = "import os; print({k: os.environ[k] for k in ('EMPTY', 'LINES', 'PATH', 'LAST')}, len(os.environ['LONG']))"
    process = start(beside, f'{sys.executable} -c "{seen}"; pwd', env)
    assert line_of(process) == f"{ {k: env[k] for k in ('EMPTY', 'LINES', 'PATH', 'LAST')} } 100000"
    assert line_of(process) == "/"


def test_nothing_starts_where_the_environment_is_cut_off(beside: list[Running]) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "horovod.runner.util.remote_exec", "/"],
        input=b"echo started\0A=1\0B=",
        capture_output=True,
    )
    assert (process.returncode, process.stdout) == (1, b"")
    assert b"before the environment had arrived" in process.stderr


def gone(pid: int, within_s: float) -> bool:
    end = time.monotonic() + within_s
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
    return True


@pytest.mark.parametrize("end", ["stdin", "SIGTERM", "SIGHUP"])
def test_the_end_of_the_launcher_ends_all_the_group(beside: list[Running], end: str) -> None:
    process = start(beside, "sleep 300 & echo $!; echo $$; wait")
    pids = [int(line_of(process)), int(line_of(process))]
    assert all(psutil.pid_exists(pid) for pid in pids)
    if end == "stdin":
        assert process.stdin is not None
        process.stdin.close()
    else:
        process.send_signal(signal.Signals[end])
    assert all(gone(pid, 4) for pid in pids)


@pytest.mark.distributed
def test_a_group_that_ignores_the_first_signal_is_killed(beside: list[Running]) -> None:
    process = start(beside, "trap '' TERM; echo $$; while :; do sleep 0.1; done")
    pid = int(line_of(process))
    assert os.getpgid(pid) == pid != os.getpgid(process.pid)
    assert process.stdin is not None
    process.stdin.close()
    assert not gone(pid, 2)
    assert gone(pid, 10)
    assert process.wait(10) == 137

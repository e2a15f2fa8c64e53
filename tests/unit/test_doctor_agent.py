"""The programs of `trainer doctor`, as processes on this host: the way in, what they read, what they exchange."""

from __future__ import annotations

import ast
import hmac
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.ops.doctor import look as looking
from trainer.ops.doctor.agent import addresses, gpus, machine, network, software
from trainer.ops.doctor.facts import Facts
from trainer.ops.doctor.look import look
from trainer.ops.doctor.program import MARK, Program, ProgramError, command, source_of
from trainer.ops.ssh import NO_ANSWER
from trainer.ops.supervise.hosts import Host

HERE, ELSEWHERE = Host("localhost", 1), Host("elsewhere", 1)
TOKEN = "0" * 32
SMI = """#!/bin/sh
case "$*" in
*clocks_event_reasons*) echo 'Field "clocks_event_reasons.hw_thermal_slowdown" is not valid.'; exit 2 ;;
--query-gpu=*) echo "0, NVIDIA A100, 525.60.13, 0, Not Active, Not Active" ;;
esac
"""
SOURCES = sorted(Path(network.__file__).parent.glob("*.py"))
LOCAL = "127.0.0.1"


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make a program named ssh, which is this shell script; $command is what a host would run."""

    def make(script: str) -> None:
        program = tmp_path / "ssh"
        program.write_text(f'#!/bin/sh\n[ "$1" != -G ] || exit 0\nfor command; do :; done\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return make


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_the_source_is_python_3_8_and_needs_the_standard_library_only(source: Path) -> None:
    tree = ast.parse(source.read_text(), feature_version=(3, 8))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    others = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    assert others == ({"torch"} if source.stem == "all_reduce" else set())


def test_what_ssh_is_given_is_one_line_because_a_csh_reads_it_too() -> None:
    assert not set("\n!") & set(" ".join(command())), "its quotes end with the line, and ! is expanded within them"


# The first call


def test_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    facts = look([HERE], "train.py", 20, with_gpus=False)
    (host,) = facts.answering
    assert (facts.incomplete, host.login.error, host.login.printed, host.gpus) == ((), "", "", None)
    assert abs(host.seconds_ahead) < 0.1
    assert host.software["script"] == "missing"
    assert host.machine["host_name"] == facts.here == socket.gethostname()
    assert host.names[""].addresses
    assert LOCAL in host.own
    assert LOCAL in facts.own_addresses


def through(script: str, ssh: Callable[[str], None], timeout_s: float = 20) -> Facts:
    ssh(script)
    return look([ELSEWHERE], "", timeout_s, with_gpus=True)


def test_another_host_through_ssh(ssh: Callable[[str], None], tmp_path: Path) -> None:
    """Its driver is older than the names of the reasons, its clock is ahead, its login shell prints."""
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    facts = through('echo; echo Welcome; printf "to b"; exec sh -c "$command"', ssh)
    (host,) = facts.answering
    assert (facts.incomplete, host.login.error, host.login.printed) == ((), "", "Welcome")
    assert host.gpus == "0, NVIDIA A100, 525.60.13, 0, Not Active, Not Active\n"
    assert host.names.keys() == {"elsewhere", ""}


def test_a_clock_is_ahead_only_as_far_as_the_call_cannot_explain(
    ssh: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "source_of", lambda name: source_of(name).replace("time.time()", "time.time() + 3600"))
    (host,) = through('sleep 1; exec sh -c "$command"', ssh).hosts
    assert 3598 < host.seconds_ahead <= 3600
    assert host.login.seconds >= 1


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("echo 'Permission denied (publickey).' >&2; exit 255", "Permission denied (publickey)."),
        ("exit 255", "ssh has ended with code 255"),
        (f"echo {MARK}; echo 'no python3 on the PATH' >&2; exit 127", "no python3 on the PATH"),
    ],
)
def test_a_login_that_fails(script: str, error: str, ssh: Callable[[str], None]) -> None:
    (host,) = through(script, ssh).hosts
    assert host.login.error == error
    assert not host.machine


def test_a_login_that_hangs_is_given_up(ssh: Callable[[str], None]) -> None:
    (host,) = through("echo 'debug1: SSH2_MSG_KEXINIT sent' >&2; exec sleep 60", ssh, timeout_s=1).hosts
    assert (host.login.error, host.login.hangs_in_key_exchange) == (NO_ANSWER, True)


def test_a_host_that_logs_in_and_does_not_answer_is_not_looked_at(ssh: Callable[[str], None]) -> None:
    facts = through(f"echo {MARK}; exec sleep 60", ssh, timeout_s=1)
    assert facts.incomplete == ("host elsewhere: no answer in time",)


def test_a_part_that_fails_does_not_take_the_others_along(
    ssh: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "source_of", lambda name: "1 / 0" if name == "software" else source_of(name))
    facts = through('exec sh -c "$command"', ssh)
    assert facts.incomplete == ("host elsewhere: software: ZeroDivisionError: division by zero",)
    assert facts.hosts[0].machine
    assert facts.hosts[0].names


def test_a_host_without_python(ssh: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sh").symlink_to("/bin/sh")
    (host,) = through(f'PATH={tmp_path}/bin exec /bin/sh -c "$command"', ssh).hosts
    assert host.login.error == "no python3 on the PATH"


def test_what_is_no_answer_is_not_heard(ssh: Callable[[str], None]) -> None:
    ssh(f"echo {MARK}; echo noise; echo '{{\"answer\": 1}}'; echo '{{\"answer\": '; cat")
    with Program(ELSEWHERE, "", {}) as program:
        assert program.has_started(10)
        assert program.answer(10) == 1
        with pytest.raises(ProgramError, match="host elsewhere"):
            program.answer(1)


def test_what_is_read_of_software(tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    (tmp_path / "train.py").write_text("print()\n")
    read = software.look(str(tmp_path), "train.py", "")
    assert read["executable"] == sys.executable
    assert read["versions"]["Python"] == sys.version.split()[0]
    assert read["versions"]["PyTorch"].startswith("2.")
    assert len(read["script"]) == len(read["library"]) == 12
    assert read["shadows"] == [str(tmp_path / "torch.py")]
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").touch()
    assert software.look(str(tmp_path), "", str(tmp_path))["library"] != read["library"], "the job's own path is read"


def test_what_is_read_of_a_machine(tmp_path: Path) -> None:
    read = machine.look(str(tmp_path))
    assert 0 < read["cores"] <= len(os.sched_getaffinity(0))
    assert read["memory_free"] > 0
    assert read["outputs"] | {"free": 0} == {"path": str(tmp_path), "free": 0, "is_writable": True}


def test_memory_that_only_holds_files_counts_as_free(tmp_path: Path) -> None:
    (tmp_path / "memory.stat").write_text("anon 7\ninactive_file 10\nactive_file 20\nslab_reclaimable 3\n")
    assert machine._cache(tmp_path) == 33
    (tmp_path / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 10\ntotal_active_file 20\n")
    assert machine._cache(tmp_path) == 30


def test_names_and_interfaces() -> None:
    read = addresses.look(["localhost", "no-such-host.invalid"])
    assert read["interfaces"]["lo"]["addresses"] == [LOCAL]
    assert LOCAL in read["own"]
    local = read["names"]["localhost"]
    assert (local["source"], local["interface"], local["in_hosts_file"]) == (LOCAL, "lo", True)
    assert read["names"]["no-such-host.invalid"]["error"]


def test_a_host_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/no")
    assert gpus.look() == ""


# The second call


def test_two_programs_exchange_bytes() -> None:
    with (
        Program(HERE, source_of("network"), {"addresses": [LOCAL], "token": TOKEN}) as listening,
        Program(HERE, source_of("network"), {"addresses": [], "token": TOKEN}) as trying,
    ):
        ports = listening.answer(20)[LOCAL]
        assert trying.answer(20) == {}
        trying.tell({"targets": {"b": [LOCAL, ports]}, "wait_s": 3, "bandwidth_s": 0.1, "all_s": 5})
        pair = trying.answer(20)["b"]
        assert pair | {"latency_s": 0, "bytes_per_s": 0} == {
            "address": LOCAL,
            "errors": {str(port): "" for port in ports},
            "latency_s": 0,
            "bytes_per_s": 0,
        }
        assert 0 < pair["latency_s"] < 0.1
        assert pair["bytes_per_s"] > 1e6


def test_a_program_ends_with_its_connection() -> None:
    program = Program(HERE, source_of("network"), {"addresses": [LOCAL], "token": TOKEN})
    (port, *_), process = program.answer(20)[LOCAL], program._process.pid
    program.close()
    assert not Path(f"/proc/{process}").exists()
    assert network.probe(LOCAL, [port], TOKEN, 3)["errors"] == {str(port): "connection refused"}


def test_hosts_are_connected_with_each_other_but_not_by_a_loopback_address(
    ssh: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts, both this one, which see each other at an address that is given for another one's."""
    ssh('exec sh -c "$command"')
    sources = {
        "addresses": source_of("addresses")
        + '\n_real = look\n_look = lambda names: {**_real(names), "names": '
        + '{name: {"addresses": ["127.0.0.2"], "source": "127.0.0.3", "interface": "eth0"} for name in ["", *names]}}\n'
        + "look = _look\n"
    }
    monkeypatch.setattr(looking, "source_of", lambda name: sources.get(name) or source_of(name))
    assert look([ELSEWHERE, Host("other", 1)], "", 20, with_gpus=False).pairs == {}
    monkeypatch.setattr("trainer.ops.doctor.facts.Name.reachable_source", property(lambda name: name.source))
    facts = look([ELSEWHERE, Host("other", 1)], "", 20, with_gpus=False)
    assert facts.incomplete == ()
    assert facts.pairs.keys() == {("elsewhere", "other"), ("other", "elsewhere")}
    for pair in facts.pairs.values():
        assert (pair.address, pair.error, pair.loses_large) == ("127.0.0.3", "", False)
        assert pair.bytes_per_s
        assert pair.bytes_per_s > 1e6


@pytest.fixture
def ports() -> list[int]:
    return network.listen(LOCAL, TOKEN)


def test_ports_are_as_jobs_take_them(ports: list[int]) -> None:
    again = network.listen(LOCAL, TOKEN)
    assert ports[1] in network._CHOSEN_PORTS
    assert ports[2] in network._FIRST_PORTS
    assert again[2] in network._FIRST_PORTS, "the next free one"
    assert again[2] != ports[2]


def test_who_has_no_token_gets_nothing(ports: list[int]) -> None:
    for port in ports:
        with socket.create_connection((LOCAL, port), timeout=5) as stranger:
            stranger.sendall(b"1" * network._PROOF_BYTES + network._REQUEST.pack(*network._PING))
            assert len(_end(stranger)) <= 32  # the challenge, and nothing after it
    answer = network.probe(LOCAL, ports, "1" * 32, 3)
    assert all(answer["errors"].values())


def test_a_proof_that_was_recorded_is_refused(ports: list[int]) -> None:
    with network._connect(LOCAL, ports[0], TOKEN, 5) as first:
        network._ask(first, *network._PING)
    with socket.create_connection((LOCAL, ports[0]), timeout=5) as second:
        challenge = network._receive(second, 32)
        other = hmac.digest(TOKEN.encode(), challenge[::-1], "sha256")
        second.sendall(other + network._REQUEST.pack(*network._PING))
        assert _end(second) == b""


def _end(connection: socket.socket) -> bytes:
    """Return what comes before the connection is closed, or reset because something was not read."""
    try:
        return connection.recv(1)
    except ConnectionResetError:
        return b""


def test_a_proof_has_one_deadline_however_it_comes(ports: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_PROOF_S", 0.3)
    began = time.monotonic()
    with (
        socket.create_connection((LOCAL, ports[0]), timeout=5) as stranger,
        pytest.raises(OSError, match=r"Broken pipe|reset"),
    ):
        _trickle(stranger)
    assert time.monotonic() - began < 2


def _trickle(connection: socket.socket) -> None:
    for _ in range(network._PROOF_BYTES - 1):
        connection.sendall(b"x")
        time.sleep(0.1)


def test_strangers_that_say_nothing_keep_nobody_out(ports: list[int]) -> None:
    strangers = [socket.create_connection((LOCAL, ports[0]), timeout=5) for _ in range(200)]
    assert network.probe(LOCAL, ports[:1], TOKEN, 5)["errors"] == {str(ports[0]): ""}
    for stranger in strangers:
        stranger.close()


def test_listening_goes_on_when_there_are_file_descriptors_again(ports: list[int]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as stranger:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            stranger.connect((LOCAL, ports[0]))
            time.sleep(0.2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert network.probe(LOCAL, ports[:1], TOKEN, 3)["errors"] == {str(ports[0]): ""}


def test_messages_that_are_larger_than_what_gets_through(ports: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener sends small messages, and none that is large."""
    send = network._send
    monkeypatch.setattr(network, "_send", lambda connection, size: send(connection, size % network.LARGE_BYTES))
    (pair,) = network.try_all(TOKEN, {"b": [LOCAL, ports]}, wait_s=0.3, bandwidth_s=0.1, all_s=5).values()
    assert pair["loses_large"] is True
    assert "bytes_per_s" not in pair

"""Agents of `trainer doctor`, as processes on this host: the way in, what they read, and the exchange of bytes."""

from __future__ import annotations

import ast
import hmac
import os
import socket
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import pytest

from trainer.ops.doctor.agent import gpus as agent_gpus
from trainer.ops.doctor.agent import host as agent_host
from trainer.ops.doctor.agent import network
from trainer.ops.doctor.connection import MARK, AgentError, Connection, _command
from trainer.ops.doctor.relay import SEGMENT
from trainer.ops.supervise.hosts import Host

HERE, ELSEWHERE = Host("localhost", 1), Host("elsewhere", 1)
TOKEN = "0" * network.TOKEN_BYTES
SMI = """#!/bin/sh
case "$*" in
*clocks_event_reasons*) echo 'Field "clocks_event_reasons.hw_thermal_slowdown" is not valid.'; exit 2 ;;
--query-gpu=*) echo "0, NVIDIA A100, 525.60.13, Enabled, 0, Not Active, Not Active, 00000000:3B:00.0" ;;
topo*) shift; echo "matrix of $*" ;;
esac
"""
LSPCI = """#!/bin/sh
printf '0000:3a:00.0 PCI bridge: one\\n\\tLnkCap: x16\\n\\t\\tACSCtl:\\tSrcValid+ ReqRedir+\\n'
"""
SOURCES = sorted(Path(network.__file__).parent.glob("*.py"))


@pytest.fixture
def agent() -> Iterator[Connection]:
    connection = Connection(HERE, 20, 60)
    try:
        yield connection
    finally:
        connection.close()


@pytest.fixture
def through_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Connection]]:
    """Start an agent through a program named ssh, which is this shell script; $command is what a host would run."""
    started: list[Connection] = []

    def connect(script: str, start_s: float = 20) -> Connection:
        program = tmp_path / "ssh"
        program.write_text(f"#!/bin/sh\nfor command; do :; done\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        started.append(Connection(ELSEWHERE, start_s, 60))
        return started[-1]

    yield connect
    for connection in started:
        connection.close()


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_the_source_is_python_3_8_and_needs_the_standard_library_only(source: Path) -> None:
    tree = ast.parse(source.read_text(), feature_version=(3, 8))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    # A relative import is of a file that is sent too.
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names


def test_an_agent_logs_in_answers_and_is_gone_after_its_connection(agent: Connection) -> None:
    login = agent.login()
    assert (login.error, login.printed) == ("", "")
    assert abs(agent.call("clock", 5) - time.time()) < 2
    process = agent._process.pid
    agent.close()
    assert not Path(f"/proc/{process}").exists()
    with pytest.raises(AgentError, match="has ended"):
        agent.call("clock", 5)


def test_no_answer_is_waited_for_after_the_end_of_the_time() -> None:
    connection = Connection(HERE, 20, 0.2)
    try:
        time.sleep(0.2)
        with pytest.raises(AgentError, match="did not answer to 'bandwidth' in 0 s"):
            connection.call("bandwidth", 30, address="127.0.0.1", port=1, token="", seconds=1)
    finally:
        connection.close()


def test_what_a_host_prints_without_an_end_takes_no_memory(through_ssh: Callable[[str], Connection]) -> None:
    tracemalloc.start()
    try:
        login = through_ssh("head -c 32000000 /dev/zero | tr '\\0' x | tee /dev/stderr; exit 3").login()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert login.error == "x" * 2000
    assert peak < 8 << 20


def test_an_answer_that_is_too_long_is_none(through_ssh: Callable[[str], Connection]) -> None:
    """It is sent once both questions have come, which follow the two lines of the agent's source."""
    answer = "head -c 2000000 /dev/zero | tr '\\0' x"
    answers = f"""printf '{{"id": 0, "value": "'; {answer}; printf '"}}\\n{{"id": 1, "value": 2}}\\n'"""
    agent = through_ssh(f"echo {MARK}; for line in 1 2 3 4; do read -r line; done; {answers}; cat")
    with ThreadPoolExecutor(2) as pool:
        asked = as_completed([pool.submit(agent.call, "clock", 30) for _ in range(2)])
        assert next(asked).result() == 2
        agent.close()
        with pytest.raises(AgentError, match="has ended"):
            next(asked).result()


def test_an_error_of_an_agent_is_one_of_its_host(agent: Connection) -> None:
    with pytest.raises(AgentError, match="localhost: TypeError"):
        agent.call("resolve", 5, unknsource=1)


def test_what_an_agent_reads_of_a_host(agent: Connection, tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    (tmp_path / "train.py").write_text("print()\n")
    machine = agent.call("machine", 5, folder=str(tmp_path))
    assert machine["host_name"] == socket.gethostname()
    assert machine["cores"] <= len(os.sched_getaffinity(0))
    assert machine["memory_free"]["machine"] > 0
    assert machine["outputs"] | {"free": 0} == {"path": str(tmp_path), "free": 0, "is_writable": True}
    software = agent.call("software", 10, folder=str(tmp_path), script="train.py", python_path="")
    assert software["executable"] == sys.executable
    assert software["versions"]["Python"] == sys.version.split()[0]
    assert software["versions"]["PyTorch"].startswith("2.")
    assert len(software["script"]) == len(software["library"]) == 12
    assert software["shadows"] == [str(tmp_path / "torch.py")]
    assert agent.call("software", 10, folder=str(tmp_path), script="x.py", python_path="")["script"] == "missing"


def test_what_an_agent_reads_of_gpus(through_ssh: Callable[[str], Connection], tmp_path: Path) -> None:
    """Of a driver that is older than the names of the reasons, as nvidia-smi prints it."""
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "lspci").write_text(LSPCI)
    for program in ("nvidia-smi", "lspci"):
        (tmp_path / program).chmod(0o755)
    agent = through_ssh('NCCL_P2P_DISABLE=1 exec sh -c "$command"')
    assert not agent.login().error
    answer = agent.call("gpus", 20)
    assert answer["query"].startswith("0, NVIDIA A100")
    assert (answer["topology"], answer["p2p"]) == ("matrix of -m\n", "matrix of -p2p r\n")
    assert answer["pci"] == {"0000:3b:00.0": {"bridges": [], "iommu": ""}}  # there is no such device
    assert answer["acs"].splitlines() == ["0000:3a:00.0 PCI bridge: one", "\t\tACSCtl:\tSrcValid+ ReqRedir+"]
    assert answer["environment"] == {"NCCL_P2P_DISABLE": "1"}
    assert answer["kernel"] == os.uname().release


def test_where_a_device_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders of /sys, somewhere else, so that the first three parts of a path are not those of /sys/devices."""
    place = tmp_path / "pci0000:3a" / "0000:3a:00.0" / "0000:3b:00.0"
    (place / "iommu_group").mkdir(parents=True)
    (place / "iommu_group" / "type").write_text("DMA-FQ\n")
    (tmp_path / "0000:3b:00.0").symlink_to(place)
    monkeypatch.setattr(agent_gpus, "_DEVICES", tmp_path)
    way = agent_gpus._way("0000:3b:00.0")
    assert way["bridges"][-2:] == ["pci0000:3a", "0000:3a:00.0"]
    assert way["iommu"] == "DMA-FQ"


def test_the_library_on_the_jobs_own_path_is_the_one_that_is_read(agent: Connection, tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").touch()
    asked = {"folder": str(tmp_path), "script": ""}
    installed, other = (
        agent.call("software", 10, python_path=path, **asked)["library"] for path in ("", str(tmp_path))
    )
    assert installed != other


def test_names_and_interfaces(agent: Connection) -> None:
    assert agent.call("interfaces", 5)["lo"]["addresses"] == ["127.0.0.1"]
    answer = agent.call("resolve", 5, names=["localhost", "no-such-host.invalid"])
    assert answer["localhost"]["source"] == "127.0.0.1"
    assert answer["localhost"]["interface"] == "lo"
    assert answer["localhost"]["in_hosts_file"]
    assert answer["no-such-host.invalid"]["error"]
    assert agent.call("owns", 5, addresses=["127.0.0.1", "192.0.2.1"]) == {"127.0.0.1": True, "192.0.2.1": False}


def test_two_agents_exchange_bytes(agent: Connection) -> None:
    other = Connection(HERE, 20, 60)
    try:
        ports = agent.call("listen", 5, address="127.0.0.1", token=TOKEN)
        answer = other.call("probe", 10, address="127.0.0.1", ports=ports, token=TOKEN, wait_s=3)
        assert answer | {"latency_s": 0} == {
            "errors": {str(port): "" for port in ports},
            "latency_s": 0,
            "large": "",
            "segment": 0,
        }
        assert 0 < answer["latency_s"] < 0.1
        assert other.call("bandwidth", 10, address="127.0.0.1", port=ports[0], token=TOKEN, seconds=0.1) > 1e6
    finally:
        other.close()


def test_who_has_no_token_gets_nothing(agent: Connection) -> None:
    ports = agent.call("listen", 5, address="127.0.0.1", token=TOKEN)
    assert ports[1] in network._CHOSEN_PORTS
    assert ports[2] in network._FIRST_PORTS
    again = agent.call("listen", 5, address="127.0.0.1", token=TOKEN)
    assert again[2] in network._FIRST_PORTS, "the next free one"
    assert again[2] != ports[2]
    for port in ports:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            stranger.sendall(b"1" * network.TOKEN_BYTES + network._REQUEST.pack(*network._PING))
            assert len(_end(stranger)) <= 32  # the challenge, and nothing after it
    answer = network.probe("127.0.0.1", ports, "1" * network.TOKEN_BYTES, 3)
    assert all(answer["errors"].values())


def test_a_proof_that_was_recorded_is_refused(agent: Connection) -> None:
    port = agent.call("listen", 5, address="127.0.0.1", token=TOKEN)[0]
    with network._connect("127.0.0.1", port, TOKEN, 5) as first:
        network._ask(first, *network._PING)
    with socket.create_connection(("127.0.0.1", port), timeout=5) as second:
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


def test_a_port_that_nobody_listens_on_is_refused() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        assert network.probe("127.0.0.1", [port], TOKEN, 3)["errors"] == {str(port): "connection refused"}


def test_messages_that_are_larger_than_what_gets_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener takes small messages, and forgets what comes after a large one's head."""
    receive = network._receive

    def forget(connection: socket.socket, size: int, deadline: float | None = None) -> bytearray:
        if size == network.LARGE_BYTES:
            time.sleep(1.0)
        return receive(connection, size, deadline)

    monkeypatch.setattr(network, "_receive", forget)
    monkeypatch.setattr(network, "_SEGMENT_S", 0.1)
    monkeypatch.setattr(network, "_LISTEN_S", 1.0)
    ports = network.listen("127.0.0.1", TOKEN)
    answer = network.probe("127.0.0.1", ports, TOKEN, 0.3)
    assert (answer["large"], answer["segment"]) == ("to", 0)


def test_ssh_runs_the_agent(through_ssh: Callable[[str], Connection]) -> None:
    connection = through_ssh('exec sh -c "$command"')
    assert connection.login().error == ""
    assert connection.call("owns", 5, addresses=[]) == {}


def test_what_a_login_shell_prints_is_told(through_ssh: Callable[[str], Connection]) -> None:
    assert through_ssh('echo; echo Welcome; printf "to b"; exec sh -c "$command"').login().printed == "Welcome"


def test_what_ssh_says_when_it_fails(through_ssh: Callable[[str], Connection]) -> None:
    login = through_ssh("echo 'Permission denied (publickey).' >&2; exit 255").login()
    assert login.error == "Permission denied (publickey)."


def test_a_host_without_python(
    through_ssh: Callable[[str], Connection], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sh").symlink_to("/bin/sh")
    login = through_ssh(f'PATH={tmp_path}/bin exec /bin/sh -c "$command"').login()
    assert login.error == "no python3 on the PATH"


def test_a_login_in_small_segments_goes_through_the_relay() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        relay = [sys.executable, str(Path(network.__file__).parent.parent / "relay.py")]
        process = subprocess.Popen(
            [*relay, "127.0.0.1", str(server.getsockname()[1])], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        with process, server.accept()[0] as connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) <= SEGMENT
            assert process.stdin is not None
            process.stdin.write(b"question")
            process.stdin.close()
            assert connection.recv(100) == b"question"
            assert connection.recv(100) == b""
            connection.sendall(b"answer")
            connection.shutdown(socket.SHUT_WR)
            assert process.stdout is not None
            assert process.stdout.read() == b"answer"
    assert process.returncode == 0
    command = _command(ELSEWHERE, in_small_segments=True)
    assert f"ProxyCommand={' '.join(relay)} %h %p" in command


def test_a_login_that_hangs_is_given_up(through_ssh: Callable[..., Connection]) -> None:
    assert through_ssh("exec sleep 60", start_s=0.3).login().error == "no answer in time"


def test_what_ssh_is_given_is_one_line_because_a_csh_reads_it_too() -> None:
    (*_, remote) = _command(ELSEWHERE, in_small_segments=False)
    assert not set("\n!") & set(remote), "its quotes end with the line, and it expands exclamation marks within them"


def test_memory_that_only_holds_files_counts_as_free(tmp_path: Path) -> None:
    (tmp_path / "memory.stat").write_text("anon 7\ninactive_file 10\nactive_file 20\nslab_reclaimable 3\n")
    assert agent_host._cache(tmp_path) == 33
    (tmp_path / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 10\ntotal_active_file 20\n")
    assert agent_host._cache(tmp_path) == 30

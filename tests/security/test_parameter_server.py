"""Attacks on a parameter server while two ranks exchange: it goes on, and tells nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import psutil
import pytest

from examples.strategies.parameter_server.identity import prove
from examples.strategies.parameter_server.strategy import ServerProcess, Stream
from examples.strategies.parameter_server.wire import METHOD, encode
from trainer import World

TOKEN = os.urandom(32).hex()
STRANGERS = 100


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    process = ServerProcess("127.0.0.1", TOKEN, 2, 60.0)
    yield process
    process.close()


@pytest.fixture(scope="module")
def ranks(server: ServerProcess) -> Iterator[list[Stream]]:
    worlds = [World(rank=rank, size=2, local_rank=rank, local_size=2, host="h") for rank in range(2)]
    streams = [Stream(server.endpoint, TOKEN, world) for world in worlds]
    yield streams
    for stream in streams:
        stream.close()


def exchange(ranks: list[Stream]) -> bool:
    """Whether the ranks get the sum of what they send."""
    for stream in ranks:
        stream.push("float64", memoryview(np.array([1.0, 2.0]).tobytes()))
    return all(np.frombuffer(stream.pull()).tolist() == [2.0, 4.0] for stream in ranks)


def intrude(server: ServerProcess, number: int) -> grpc.StatusCode:
    facts = (number % 2, "h")
    proofs = (
        b"",
        TOKEN[:-1].encode(),
        prove("a guess", "parameter server", server.endpoint, *facts),
        prove(TOKEN, "parameter server", "another:1", *facts),
    )
    metadata = (("proof-bin", proofs[number % 4]), ("rank", str(facts[0])), ("host", "h"))
    with grpc.insecure_channel(server.endpoint, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        answers = channel.stream_stream(METHOD)(iter([encode("float64", bytes(8))] * 3), metadata=metadata)
        with pytest.raises(grpc.RpcError):
            next(answers)
        code: grpc.StatusCode = answers.code()
        return code


def test_strangers_are_refused_in_a_burst(server: ServerProcess, ranks: list[Stream]) -> None:
    assert exchange(ranks)
    with ThreadPoolExecutor(4) as pool:
        codes = set(pool.map(lambda number: intrude(server, number), range(STRANGERS)))
    assert codes == {grpc.StatusCode.UNAUTHENTICATED}
    assert exchange(ranks)


def test_a_recorded_proof_opens_no_second_stream(server: ServerProcess, ranks: list[Stream]) -> None:
    assert exchange(ranks)
    proof = prove(TOKEN, "parameter server", server.endpoint, 1, "h")
    metadata = (("proof-bin", proof), ("rank", "1"), ("host", "h"))
    with grpc.insecure_channel(server.endpoint) as channel:
        answers = channel.stream_stream(METHOD)(iter(()), metadata=metadata)
        with pytest.raises(grpc.RpcError):
            next(answers)
        assert answers.code() is grpc.StatusCode.ALREADY_EXISTS
    assert exchange(ranks)


@pytest.mark.parametrize(
    "data",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(range(256)) * 40, bytes(100_000)],
)
def test_what_is_no_grpc_ends_nothing(server: ServerProcess, ranks: list[Stream], data: bytes) -> None:
    host, port = server.endpoint.split(":")
    for _ in range(20):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            try:
                connection.sendall(data)
            except ConnectionError:
                continue
    assert exchange(ranks)


def test_it_listens_on_its_address_only(server: ServerProcess) -> None:
    found = [
        one.laddr.ip for one in psutil.Process(server._process.pid).net_connections("tcp") if one.status == "LISTEN"
    ]
    assert {address.removeprefix("::ffff:") for address in found} == {"127.0.0.1"}

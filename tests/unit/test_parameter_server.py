"""The parameter server by itself: its messages, its token, and the error when a rank is missing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from examples.strategies.parameter_server.strategy import ServerProcess, Stream, _sum, server_settings
from trainer import ConfigError, TrainerError, World

TOKEN = "the job's"  # noqa: S105
TIMEOUT_S = 4.0


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    """One for two ranks on this host."""
    process = ServerProcess("127.0.0.1", TOKEN, 2, TIMEOUT_S)
    try:
        yield process
    finally:
        process._process.kill()
        process.close()


def link(server: ServerProcess, rank: int, token: str = TOKEN) -> Stream:
    return Stream(
        server.endpoint, "gradients", token, World(rank=rank, size=2, local_rank=rank, local_size=2, host=f"h{rank}")
    )


def push(stream: Stream, *values: float) -> None:
    stream.push("float64", memoryview(np.array(values).tobytes()))


def floats(answer: memoryview) -> list[float]:
    return torch.frombuffer(bytearray(answer), dtype=torch.float64).tolist()


def exchange_once(ranks: list[Stream]) -> None:
    for stream in ranks:
        push(stream, 1.0)
    for stream in ranks:
        stream.pull()


def test_the_sum_of_both_ranks_comes_back_to_both(server: ServerProcess) -> None:
    ranks = [link(server, rank) for rank in (0, 1)]
    for rank, stream in enumerate(ranks):
        push(stream, rank + 1.0, 10.0)
        push(stream, rank * 5.0)
    for stream in ranks:
        assert floats(stream.pull()) == [3.0, 20.0]
        assert floats(stream.pull()) == [5.0]
        assert stream.bytes_sent == 24
        stream.close()


def test_chunks_are_distributed_to_several_servers(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.strategies.parameter_server.strategy.CHUNK_BYTES", 16)
    second = ServerProcess("127.0.0.1", TOKEN, 1, TIMEOUT_S)
    first = ServerProcess("127.0.0.1", TOKEN, 1, TIMEOUT_S)
    links = [Stream(process.endpoint, "gradients", TOKEN, World()) for process in (first, second)]
    flat = torch.arange(11, dtype=torch.float32)
    _sum(links, flat)
    assert flat.tolist() == list(range(11))
    assert [stream.bytes_sent for stream in links] == [16 + 12, 16]
    for stream in links:
        stream.close()
    first.close()
    second.close()


@pytest.mark.distributed
def test_a_rank_that_does_not_send_in_time_is_named(server: ServerProcess) -> None:
    ranks = [link(server, rank) for rank in (0, 1)]
    exchange_once(ranks)
    push(ranks[0], 1.0)
    with pytest.raises(TrainerError, match=r"rank 1 on host h1 did not send within 4 s"):
        ranks[0].pull()
    for stream in ranks:
        stream.close()


def test_a_rank_that_has_gone_is_named_at_once(server: ServerProcess) -> None:
    ranks = [link(server, rank) for rank in (0, 1)]
    exchange_once(ranks)
    ranks[1].close()
    push(ranks[0], 1.0)
    with pytest.raises(TrainerError, match="rank 1 on host h1 has gone"):
        ranks[0].pull()
    ranks[0].close()


def test_ranks_that_send_different_things_are_told_of_both(server: ServerProcess) -> None:
    ranks = [link(server, rank) for rank in (0, 1)]
    push(ranks[0], 1.0)
    push(ranks[1], 1.0, 2.0)
    for stream in ranks:
        with pytest.raises(TrainerError, match="rank 1 sends 2 × float64, where others send 1 × float64"):
            stream.pull()
        stream.close()


def test_a_server_that_dies_is_named(server: ServerProcess) -> None:
    stream = link(server, 0)
    push(stream, 1.0)
    os.kill(server._process.pid, signal.SIGKILL)
    with pytest.raises(TrainerError, match=f"lost the parameter server at {server.endpoint}"):
        stream.pull()
    stream.close()


def test_a_server_that_cannot_listen_is_one_line() -> None:
    with pytest.raises(TrainerError, match=r"the parameter server does not start on 192\.0\.2\.1"):
        ServerProcess("192.0.2.1", TOKEN, 2, TIMEOUT_S)


def test_settings() -> None:
    assert server_settings(4, {}) == (1, 600.0)
    assert server_settings(4, {"TRAINER_PARAMETER_SERVERS": "2", "TRAINER_PARAMETER_SERVER_TIMEOUT_S": "1.5"}) == (
        2,
        1.5,
    )
    for wrong in ("0", "5", "two", "-1"):
        with pytest.raises(
            ConfigError, match=f"TRAINER_PARAMETER_SERVERS is '{wrong}'; with 4 ranks, valid are 1 to 4"
        ):
            server_settings(4, {"TRAINER_PARAMETER_SERVERS": wrong})
    for wrong in ("0", "soon", "inf", "nan"):
        with pytest.raises(ConfigError, match=f"TRAINER_PARAMETER_SERVER_TIMEOUT_S is '{wrong}'"):
            server_settings(4, {"TRAINER_PARAMETER_SERVER_TIMEOUT_S": wrong})

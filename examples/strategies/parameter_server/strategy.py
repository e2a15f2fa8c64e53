"""Gradient synchronization by a parameter server: every rank pushes its gradients and pulls the mean, over gRPC.

The server receives and sends K bytes for each of N ranks, where in a ring each rank sends 2·K·(N - 1)/N. This strategy
is here for that comparison; see docs/strategies.md.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor

from examples.strategies.parameter_server.identity import job_token, prove
from examples.strategies.parameter_server.wire import CHUNK_BYTES, METHOD, OPTIONS, decode, encode
from examples.strategies.summing import SummingStrategy
from trainer.cluster.environment import set_default
from trainer.cluster.network import address_toward, host_id
from trainer.cluster.world import World
from trainer.errors import ConfigError, TrainerError
from trainer.tuning import tune

_SERVER = Path(__file__).resolve().with_name("server.py")
_CLOSE_TIMEOUT_S = 5.0


class ParameterServerStrategy(SummingStrategy):
    """Bucketed gradients, summed by one or more server processes.

    Ranks spread evenly over the job start the servers; the default is one, on rank 0's host.
    TRAINER_PARAMETER_SERVERS sets another number, among which the chunks of every tensor are distributed. Servers
    listen on the network between the ranks only, and accept only clients that prove the job's token.

    Raises:
        ConfigError: gRPC is not installed, a setting is not valid, or the launcher provides no rendezvous.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        servers, timeout_s = server_settings(world.size)
        _import_grpc()
        self.tuning = tune(world)
        self._servers, self._timeout_s = servers, timeout_s
        self._server: ServerProcess | None = None
        self._streams: list[Stream] = []
        count = "a parameter server" if servers == 1 else f"{servers} parameter servers"
        self.description = f"{count} over gRPC, {world}"

    def connect(self) -> None:
        super().connect()
        world = self.world
        address = address_toward(self.all_gather_object(host_id()))
        token = job_token(self.all_gather_object)
        if world.rank in [number * world.size // self._servers for number in range(self._servers)]:
            self._server = ServerProcess(address, token, world.size, self._timeout_s)
        endpoints = self.all_gather_object(self._server.endpoint if self._server else "")
        self._streams = [Stream(endpoint, token, world) for endpoint in filter(None, endpoints)]

    def sum_gradients(self, flat: Tensor) -> None:
        _sum(self._streams, flat)

    @property
    def bytes_sent(self) -> int:
        """Bytes of gradients that this rank has sent since the strategy was made."""
        return sum(stream.bytes_sent for stream in self._streams)

    def close(self) -> None:
        super().close()
        for stream in self._streams:
            stream.close()
        if self._server is not None:
            self._server.close()
            self._server = None


def _sum(streams: list[Stream], flat: Tensor) -> None:
    """Sum `flat` over all ranks, in place; its chunks are distributed to the servers in turn."""
    kind = str(flat.dtype).removeprefix("torch.")
    # As bytes, because NumPy has no bfloat16.
    chunks = [piece.numpy() for piece in flat.view(torch.uint8).split(CHUNK_BYTES) if piece.numel()]
    for number, chunk in enumerate(chunks):
        streams[number % len(streams)].push(kind, memoryview(chunk))
    # The answer to a chunk comes when all ranks have sent theirs, so what is overwritten here has been sent.
    for number, chunk in enumerate(chunks):
        chunk[:] = np.frombuffer(streams[number % len(streams)].pull(), np.uint8)


class Stream:
    """This rank's stream to one server.

    Args:
        endpoint: the server's address and port.
    """

    def __init__(self, endpoint: str, token: str, world: World) -> None:
        grpc = _import_grpc()
        self._error = grpc.RpcError
        self._endpoint = endpoint
        self._outbox: SimpleQueue[tuple[str, memoryview] | None] = SimpleQueue()
        self._sender_has_ended = threading.Event()
        self.bytes_sent = 0
        facts = {"rank": str(world.rank), "host": world.host}
        proof = prove(token, "parameter server", endpoint, *facts.values())
        metadata = (("proof-bin", proof), *facts.items())
        self._connection = grpc.insecure_channel(endpoint, options=OPTIONS)
        # Without serializers, gRPC hands bytes over as they are.
        self._answers = self._connection.stream_stream(METHOD)(self._messages(), metadata=metadata)

    def push(self, kind: str, data: memoryview) -> None:
        """Queue a chunk. A thread of gRPC's encodes and sends it; it must not change until it is answered."""
        self._outbox.put((kind, data))
        self.bytes_sent += len(data)

    def pull(self) -> memoryview:
        """Return the answer to the oldest chunk that has none yet.

        Raises:
            TrainerError: the server has ended the job, or is gone.
        """
        try:
            return decode(next(self._answers))[1]
        except self._error as error:
            if error.code().name in ("ABORTED", "UNAUTHENTICATED", "ALREADY_EXISTS"):
                raise TrainerError(f"the parameter server ended the job: {error.details()}") from None
            raise TrainerError(f"lost the parameter server at {self._endpoint} ({error.details()})") from None
        except StopIteration:
            raise TrainerError(f"the parameter server at {self._endpoint} has closed the stream") from None

    def close(self) -> None:
        """End the stream. A second call does nothing."""
        self._outbox.put(None)
        # A tensor that gRPC's thread releases while Python is already shutting down aborts the process.
        self._sender_has_ended.wait(_CLOSE_TIMEOUT_S)
        self._connection.close()

    def _messages(self) -> Iterator[bytes]:
        try:
            while (chunk := self._outbox.get()) is not None:
                yield encode(*chunk)
                del chunk
        finally:
            self._sender_has_ended.set()


class ServerProcess:
    """A server process of this job, which ends when this process does.

    Raises:
        TrainerError: it does not start.
    """

    def __init__(self, address: str, token: str, ranks: int, timeout_s: float) -> None:
        settings: dict[str, Any] = {"address": address, "token": token, "ranks": ranks, "timeout_s": timeout_s}
        paths = [str(_SERVER.parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
        # In a session of its own, so that Ctrl-C reaches the ranks only; the server ends after them.
        self._process = subprocess.Popen(
            [sys.executable, str(_SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        )
        self._stdin, self._stdout = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
        # Over stdin, because `ps` would show the token on a command line.
        print(json.dumps(settings), file=self._stdin, flush=True)
        port = self._stdout.readline().strip()
        if not port:
            raise TrainerError(f"the parameter server does not start on {address}: exit code {self._process.wait()}")
        self.endpoint = f"{address}:{port}"

    def close(self) -> None:
        """Wait for the other ranks to leave as well, up to a timeout, and end the server."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_CLOSE_TIMEOUT_S)
        with suppress(OSError):
            self._stdin.close()
        self._process.wait()
        self._stdout.close()


def server_settings(ranks: int, environ: Mapping[str, str] = os.environ) -> tuple[int, float]:
    """Return the number of parameter servers for so many ranks, and the timeout in seconds for a rank's chunk.

    Raises:
        ConfigError: TRAINER_PARAMETER_SERVERS or TRAINER_PARAMETER_SERVER_TIMEOUT_S is not valid.
    """
    servers = environ.get("TRAINER_PARAMETER_SERVERS") or "1"
    timeout_s = environ.get("TRAINER_PARAMETER_SERVER_TIMEOUT_S") or "600"
    if not servers.isdecimal() or not 1 <= int(servers) <= ranks:
        raise ConfigError(f"TRAINER_PARAMETER_SERVERS is {servers!r}; with {ranks} ranks, valid are 1 to {ranks}")
    try:
        seconds = float(timeout_s)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"TRAINER_PARAMETER_SERVER_TIMEOUT_S is {timeout_s!r}; valid is a positive number of seconds")
    return int(servers), seconds


def _import_grpc() -> Any:
    # DataLoader's workers are forked and never call gRPC, whose fork handlers only print lines.
    set_default("GRPC_ENABLE_FORK_SUPPORT", "false")
    try:
        import grpc
    except ImportError:
        raise ConfigError(
            "strategy 'parameter_server' needs gRPC; install it with `pip install grpcio psutil`"
        ) from None
    return grpc

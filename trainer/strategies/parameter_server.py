"""Gradients meet at a parameter server: every rank pushes its own and pulls the mean, over gRPC.

The server has to take in and send out K bytes for every one of N ranks, where in a ring everybody sends 2·K·(N - 1)/N:
that is what this strategy is here to show. See docs/strategies.md.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor

from trainer import tuning
from trainer.config import parameter_server_settings, set_default
from trainer.errors import ConfigError, TrainerError
from trainer.meeting import Meeting, address_towards, here
from trainer.parameter_server.wire import CHUNK_BYTES, METHOD, OPTIONS, decode, encode
from trainer.strategies.buckets import BucketedStrategy
from trainer.world import World

_SERVER = Path(__file__).resolve().parent.parent / "parameter_server" / "server.py"
_FAREWELL_S = 5.0


class ParameterServerStrategy(BucketedStrategy):
    """Bucketed gradients, summed by one or more server processes.

    The servers are started by ranks spread evenly over the job, one on rank 0's host as it comes;
    TRAINER_PARAMETER_SERVERS sets another number, over which the chunks of every tensor are then dealt. They listen
    on the network between the ranks only, and take in only who shows the job's token, which travels as the launcher
    lets its ranks meet. Nothing is encrypted.

    Raises:
        ConfigError: gRPC is not installed, a setting is not valid, or the launcher lets nobody meet.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        servers, patience_s = parameter_server_settings(world.size)
        _import_grpc()
        self.tuning = tuning.tune_host(world) if world.launcher == "torchrun" else tuning.tune_mpi(world)
        meeting = Meeting(world)
        places = meeting.gather(here())
        token = meeting.gather(secrets.token_hex(32) if world.is_root else "")[0]
        self._server: ServerProcess | None = None
        if world.rank in [number * world.size // servers for number in range(servers)]:
            self._server = ServerProcess(address_towards(places), token, world.size, patience_s)
        served = [place for place in meeting.gather(self._server.place if self._server else "") if place]
        self._links = {
            channel: [Link(place, channel, token, world) for place in served] for channel in ("gradients", "values")
        }
        meeting.close()
        atexit.register(self.close)
        count = "a parameter server" if servers == 1 else f"{servers} parameter servers"
        self.description = f"{count} over gRPC, {world}"

    def sum_gradients(self, flat: Tensor) -> None:
        _sum(self._links["gradients"], flat)

    def sum_values(self, flat: Tensor) -> None:
        _sum(self._links["values"], flat)

    @property
    def bytes_sent(self) -> int:
        """By this rank, for gradients, since the strategy was made."""
        return sum(link.bytes_sent for link in self._links["gradients"])

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        link = self._links["values"][0]
        link.push("", memoryview(pickle.dumps(value) if self.world.rank == root else b""))
        return pickle.loads(link.pull())  # noqa: S301 (inside the job only, whose ranks have shown its token)

    def barrier(self) -> None:
        self.broadcast_object(None)

    def close(self) -> None:
        super().close()
        for links in self._links.values():
            for link in links:
                link.close()
        if self._server is not None:
            self._server.close()
            self._server = None


def _sum(links: list[Link], flat: Tensor) -> None:
    """Sums `flat` over all ranks, in place: its chunks are dealt to the servers in turn."""
    if flat.dtype == torch.bfloat16:  # which NumPy does not have
        wide = flat.float()
        _sum(links, wide)
        flat.copy_(wide)
        return
    chunks = [piece.numpy() for piece in flat.split(CHUNK_BYTES // flat.element_size()) if piece.numel()]
    for number, chunk in enumerate(chunks):
        links[number % len(links)].push(chunk.dtype.name, memoryview(chunk).cast("B"))
    # The answer to a chunk comes when all ranks have sent theirs, so what is overwritten here has left.
    for number, chunk in enumerate(chunks):
        chunk[:] = np.frombuffer(links[number % len(links)].pull(), chunk.dtype)


class Link:
    """This rank's stream to one server.

    Args:
        place: the server's address and port.
        channel: "gradients" or "values"; each has its own order of chunks.
    """

    def __init__(self, place: str, channel: str, token: str, world: World) -> None:
        grpc = _import_grpc()
        self._error = grpc.RpcError
        self._place = place
        self._outbox: SimpleQueue[tuple[str, memoryview] | None] = SimpleQueue()
        self._sender_has_left = threading.Event()
        self.bytes_sent = 0
        metadata = (("authorization", token), ("rank", str(world.rank)), ("channel", channel), ("host", world.host))
        self._connection = grpc.insecure_channel(place, options=OPTIONS)
        # Without serializers, gRPC hands bytes over as they are.
        self._answers = self._connection.stream_stream(METHOD)(self._messages(), metadata=metadata)

    def push(self, kind: str, data: memoryview) -> None:
        """Queues a chunk; it is encoded and sent by a thread of gRPC's, and must not change until it is answered."""
        self._outbox.put((kind, data))
        self.bytes_sent += len(data)

    def pull(self) -> memoryview:
        """The answer to the oldest chunk that has none yet.

        Raises:
            TrainerError: the server has given the job up, or is gone.
        """
        try:
            return decode(next(self._answers))[1]
        except self._error as error:
            if error.code().name in ("ABORTED", "UNAUTHENTICATED", "ALREADY_EXISTS"):
                raise TrainerError(f"the parameter server ended the job: {error.details()}") from None
            raise TrainerError(f"lost the parameter server at {self._place} ({error.details()})") from None
        except StopIteration:
            raise TrainerError(f"the parameter server at {self._place} has closed the stream") from None

    def close(self) -> None:
        """Says farewell. A second call does nothing."""
        self._outbox.put(None)
        # A tensor that gRPC's thread lets go of while Python is already shutting down aborts the process.
        self._sender_has_left.wait(_FAREWELL_S)
        self._connection.close()

    def _messages(self) -> Iterator[bytes]:
        try:
            while (chunk := self._outbox.get()) is not None:
                yield encode(*chunk)
                del chunk
        finally:
            self._sender_has_left.set()


class ServerProcess:
    """A server of this job, which ends when this process does.

    Raises:
        TrainerError: it does not start.
    """

    def __init__(self, address: str, token: str, ranks: int, patience_s: float) -> None:
        settings = {"address": address, "token": token, "ranks": ranks, "patience_s": patience_s}
        # In a session of its own, so that Ctrl-C reaches the ranks alone; it ends when they have left.
        self._process = subprocess.Popen(
            [sys.executable, str(_SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._stdin, self._stdout = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
        # Over stdin, where no `ps` shows the token.
        print(json.dumps(settings), file=self._stdin, flush=True)
        port = self._stdout.readline().strip()
        if not port:
            raise TrainerError(f"the parameter server does not start on {address}: exit code {self._process.wait()}")
        self.place = f"{address}:{port}"

    def close(self) -> None:
        """Waits until the other ranks have left, too, but not long."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_FAREWELL_S)
        with suppress(OSError):
            self._stdin.close()
        self._process.wait()
        self._stdout.close()


def _import_grpc() -> Any:
    # DataLoader's workers are forked off and never call gRPC; its preparations for a child that does only print lines.
    set_default("GRPC_ENABLE_FORK_SUPPORT", "false")
    try:
        import grpc
    except ImportError:
        raise ConfigError(
            "strategy 'parameter_server' needs gRPC; install it with `pip install trainer[parameter-server]`"
        ) from None
    return grpc

"""Parameter server: sums what all ranks push, and lets each rank pull the sum. A process of its own.

A rank starts it, with one line of JSON on its stdin: {"address", "token", "ranks", "timeout_s"}. It prints its port on
stdout. It ends when all ranks have left, or when stdin is closed, as it is when the rank that started it has ended.

It is synchronous, after Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014), but
leaves the update of the weights to the ranks, whose optimizers are PyTorch's own.

It runs as a script and imports neither PyTorch nor what does, which would take seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

# A script finds the modules in its own folder; the package's own imports PyTorch.
from identity import is_proof  # type: ignore[import-not-found]
from wire import METHOD, OPTIONS, decode, encode  # type: ignore[import-not-found]

# For who connects and opens no stream. Those of ranks are open for as long as the job trains.
_BOUNDS = (
    ("grpc.max_connection_idle_ms", 30_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_concurrent_streams", 16),
)


def add_up(messages: Sequence[bytes]) -> bytes:
    """Return the sum of all ranks' chunks, added up in the order of the ranks, so that runs are reproducible.

    Raises:
        ValueError: they do not fit each other.
    """
    kind, data = decode(messages[0])
    total: Any = _numbers(kind, data).copy()
    for rank, message in enumerate(messages[1:], start=1):
        other, data = decode(message)
        values = _numbers(other, data)
        if (other, values.shape) != (kind, total.shape):
            raise ValueError(f"rank {rank} sends {values.size} × {other}, where others send {total.size} × {kind}")
        total += values
    if kind == "bfloat16":
        bits = total.view(np.uint32)
        total = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)  # to the nearest, ties to even
    result: bytes = encode(kind, memoryview(total).cast("B"))
    return result


def _numbers(kind: str, data: memoryview) -> Any:
    if kind != "bfloat16":
        return np.frombuffer(data, dtype=kind)
    # NumPy does not have it. It is the upper half of a float32, in which it is added up.
    return (np.frombuffer(data, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)


@dataclass
class Channel:
    """What the ranks exchange. Their n-th chunks belong together, and each rank gets the sum of these."""

    chunks: list[deque[bytes]]
    """chunks[rank]: what a rank has sent and another has not sent yet."""
    answers: dict[int, asyncio.Queue[bytes | None]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    """Ranks whose stream has ended. That is an error only where a chunk waits for one of them."""
    timeout: asyncio.TimerHandle | None = None

    @property
    def missing(self) -> set[int]:
        """The ranks that a chunk waits for."""
        missing = {rank for rank, chunks in enumerate(self.chunks) if not chunks}
        return missing if len(missing) < len(self.chunks) else set()


class Server:
    """The state of a job, in the one thread of asyncio.

    Args:
        token: the job's token, which every stream has to prove that it knows.
        ranks: world size.
        timeout_s: how long a chunk waits for the other ranks' before the job is ended.
    """

    def __init__(self, token: str, ranks: int, timeout_s: float) -> None:
        self._token, self._ranks, self._timeout_s = token, ranks, timeout_s
        self._channel = Channel([deque() for _ in range(ranks)])
        self._hosts: dict[int, str] = {}
        self._open = 0
        self.endpoint = ""
        """Address and port, once the server has one."""
        self._failure = ""
        self.over = asyncio.Event()

    async def exchange(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Serve one stream; see wire.py."""
        rank, queue = await self._admit(context)
        reader = asyncio.create_task(self._read(rank, messages, queue))
        self._open += 1
        try:
            while (answer := await queue.get()) is not None:
                yield answer
            if self._failure:
                await context.abort(grpc.StatusCode.ABORTED, self._failure)
        finally:
            reader.cancel()
            self._channel.gone.add(rank)
            self._answer()
            self._open -= 1
            if not self._open:
                self.over.set()

    async def _admit(self, context: Any) -> tuple[int, asyncio.Queue[bytes | None]]:
        told = dict(context.invocation_metadata())
        facts = (told.get(name, "") for name in ("rank", "host"))
        # Each rank is admitted once, so a proof that somebody recorded is of no use.
        if not is_proof(told.get("proof-bin", b""), self._token, "parameter server", self.endpoint, *facts):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token: this is no rank of this job")
        rank = int(told["rank"])
        if rank in self._channel.answers or not 0 <= rank < self._ranks:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"there is a rank {rank} already, or cannot be one")
        self._hosts[rank] = told["host"]
        queue = self._channel.answers[rank] = asyncio.Queue()
        return rank, queue

    async def _read(self, rank: int, messages: AsyncIterator[bytes], queue: asyncio.Queue[bytes | None]) -> None:
        try:
            async for message in messages:
                self._channel.chunks[rank].append(message)
                self._answer()
        except Exception as error:  # whatever it is, no rank may wait for this stream
            self._fail(str(error) or type(error).__name__)
        queue.put_nowait(None)

    def _answer(self) -> None:
        """Send the sums of what all ranks have sent. A chunk fails that waits for a rank that has gone, or too long."""
        if self._failure:
            return
        channel = self._channel
        while all(channel.chunks):
            answer = add_up([chunks.popleft() for chunks in channel.chunks])
            for queue in channel.answers.values():
                queue.put_nowait(answer)
        if channel.timeout is not None:
            channel.timeout.cancel()
        if channel.missing:
            channel.timeout = asyncio.get_running_loop().call_later(self._timeout_s, self._fail_late)
        if lost := channel.missing & channel.gone:
            self._fail(f"{self._named(lost)} has gone")

    def _fail_late(self) -> None:
        self._fail(f"{self._named(self._channel.missing)} did not send within {self._timeout_s:g} s")

    def _fail(self, reason: str) -> None:
        """End every stream with an error. The first reason counts, because others follow from it."""
        self._failure = self._failure or reason
        for queue in self._channel.answers.values():
            queue.put_nowait(None)

    def _named(self, ranks: Iterable[int]) -> str:
        return ", ".join(f"rank {rank} on host {self._hosts.get(rank, 'unknown')}" for rank in sorted(ranks))


async def serve(settings: dict[str, Any]) -> None:
    """Serve one job, from printing the port until the last rank has left."""
    state = Server(settings["token"], settings["ranks"], settings["timeout_s"])
    server = grpc.aio.server(options=(*OPTIONS, *_BOUNDS))
    # Without serializers, gRPC passes bytes on unchanged.
    handler = grpc.stream_stream_rpc_method_handler(state.exchange)
    service, method = METHOD.strip("/").split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port(f"{settings['address']}:0")
    state.endpoint = f"{settings['address']}:{port}"
    await server.start()
    print(port, flush=True)
    await state.over.wait()
    await server.stop(grace=1.0)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    asyncio.run(serve(job))

"""Parameter server: sums what all ranks push, and lets each rank pull the sum. A process of its own.

A rank starts it, with one line of JSON on its stdin: {"address", "token", "ranks", "timeout_s", "tls"}, of which the
last is null or {"authority", "certificate", "key"}, PEM texts. It prints its port on stdout. It ends when all ranks
have left, or when stdin is closed, as it is when the rank that started it has ended.

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
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

# A script finds the modules in its own folder; the package's own imports PyTorch.
from wire import METHOD, OPTIONS, decode, encode  # type: ignore[import-not-found]

from trainer.cluster.identity import is_proof

# For who connects and opens no stream. Those of ranks are open for as long as the job trains.
_BOUNDS = (
    ("grpc.max_connection_idle_ms", 30_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_concurrent_streams", 16),
)


@dataclass
class Slot:
    """The n-th chunks of a channel, as far as ranks have sent them."""

    deadline: float
    missing: set[int]
    early: dict[int, bytes] = field(default_factory=dict)
    """Chunks that wait until those of all lower ranks have been added."""
    added: int = 0
    kind: str = ""
    total: Any = None
    """The sum so far, an array; or the bytes of the only rank that sent any."""

    def take(self, rank: int, message: bytes) -> None:
        """Store a rank's chunk, and add up in the order of the ranks as far as possible, so that runs are reproducible.

        Raises:
            ValueError: it does not fit the others'.
        """
        self.early[rank] = message
        while self.added in self.early:
            self._add(self.added, self.early.pop(self.added))
            self.added += 1
        self.missing.discard(rank)

    def _add(self, rank: int, message: bytes) -> None:
        kind, data = decode(message)
        first = self.total is None
        if not first and bool(kind) != bool(self.kind):
            raise ValueError(f"rank {rank} sends {kind or 'an object'}, where others send {self.kind or 'an object'}")
        if not kind:
            self.total = bytes(data) if first or len(data) else self.total
            return
        values = np.frombuffer(data, dtype=kind)
        if first:
            self.kind, self.total = kind, values.copy()
        elif (kind, values.shape) != (self.kind, self.total.shape):
            raise ValueError(
                f"rank {rank} sends {values.size} × {kind}, where others send {self.total.size} × {self.kind}"
            )
        else:
            self.total += values

    def answer(self) -> bytes:
        """Return the one message that all ranks get."""
        message: bytes = encode(self.kind, memoryview(self.total).cast("B") if self.kind else self.total)
        return message


@dataclass
class Channel:
    """One kind of exchange: its own order of chunks, and a queue of answers per rank."""

    answers: dict[int, asyncio.Queue[bytes | None]] = field(default_factory=dict)
    slots: dict[int, Slot] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    """Ranks whose stream has ended. That is an error only where a chunk waits for one of them."""


class Server:
    """The state of a job, in the one thread of asyncio.

    Args:
        token: the job's token, which every stream has to prove that it knows.
        ranks: world size.
        timeout_s: how long a chunk waits for the other ranks' before the job is ended.
    """

    def __init__(self, token: str, ranks: int, timeout_s: float) -> None:
        self._token, self._ranks, self._timeout_s = token, ranks, timeout_s
        self._channels: dict[str, Channel] = {}
        self._hosts: dict[int, str] = {}
        self._open = 0
        self.endpoint = ""
        """Address and port, once the server has one."""
        self._failure = ""
        self.over = asyncio.Event()

    async def exchange(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Serve one stream; see wire.py."""
        rank, channel, queue = await self._admit(context)
        reader = asyncio.create_task(self._read(rank, channel, messages, queue))
        self._open += 1
        try:
            while (answer := await queue.get()) is not None:
                yield answer
            if self._failure:
                await context.abort(grpc.StatusCode.ABORTED, self._failure)
        finally:
            reader.cancel()
            channel.gone.add(rank)
            self._fail_if_gone(channel)
            self._open -= 1
            if not self._open:
                self.over.set()

    async def _admit(self, context: Any) -> tuple[int, Channel, asyncio.Queue[bytes | None]]:
        told = dict(context.invocation_metadata())
        facts = (told.get(name, "") for name in ("rank", "channel", "host"))
        # Each rank and channel is admitted once, so a proof that somebody recorded is of no use.
        if not is_proof(told.get("proof-bin", b""), self._token, "parameter server", self.endpoint, *facts):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token: this is no rank of this job")
        rank = int(told["rank"])
        channel = self._channels.setdefault(told["channel"], Channel())
        if rank in channel.answers or not 0 <= rank < self._ranks:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"there is a rank {rank} already, or cannot be one")
        self._hosts[rank] = told["host"]
        queue = channel.answers[rank] = asyncio.Queue()
        return rank, channel, queue

    async def _read(
        self, rank: int, channel: Channel, messages: AsyncIterator[bytes], queue: asyncio.Queue[bytes | None]
    ) -> None:
        number = 0
        try:
            async for message in messages:
                self._take(rank, channel, number, message)
                number += 1
        except Exception as error:  # whatever it is, no rank may wait for this stream
            self._fail(str(error) or type(error).__name__)
        queue.put_nowait(None)

    def _take(self, rank: int, channel: Channel, number: int, message: bytes) -> None:
        slot = channel.slots.get(number)
        if slot is None:
            deadline = asyncio.get_running_loop().time() + self._timeout_s
            slot = channel.slots[number] = Slot(deadline, set(range(self._ranks)))
        slot.take(rank, message)
        if not slot.missing:
            del channel.slots[number]
            answer = slot.answer()
            for queue in channel.answers.values():
                queue.put_nowait(answer)
        self._fail_if_gone(channel)

    def _fail_if_gone(self, channel: Channel) -> None:
        """Fail where a chunk waits for a rank whose stream has ended."""
        waited_for = {rank for slot in channel.slots.values() for rank in slot.missing}
        if lost := waited_for & channel.gone:
            self._fail(f"{self._named(lost)} has gone")

    def _fail(self, reason: str) -> None:
        """End every stream with the reason; the first reason counts."""
        self._failure = self._failure or reason
        for channel in self._channels.values():
            for queue in channel.answers.values():
                queue.put_nowait(None)

    async def watch(self) -> None:
        """End the job when a chunk has waited longer than the timeout."""
        while True:
            await asyncio.sleep(min(1.0, self._timeout_s / 4))
            now = asyncio.get_running_loop().time()
            late = {
                rank
                for channel in self._channels.values()
                for slot in channel.slots.values()
                if slot.deadline < now
                for rank in slot.missing
            }
            if late:
                self._fail(f"{self._named(late)} did not send within {self._timeout_s:g} s")

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
    port = _add_port(server, f"{settings['address']}:0", settings.get("tls"))
    state.endpoint = f"{settings['address']}:{port}"
    await server.start()
    print(port, flush=True)
    watching = asyncio.create_task(state.watch())
    await state.over.wait()
    watching.cancel()
    await server.stop(grace=1.0)


def _add_port(server: Any, endpoint: str, tls: dict[str, str] | None) -> int:
    if tls is None:
        return int(server.add_insecure_port(endpoint))
    pair = tls["key"].encode(), tls["certificate"].encode()
    # Without a certificate of this authority, nobody gets as far as the token.
    credentials = grpc.ssl_server_credentials([pair], tls["authority"].encode(), require_client_auth=True)
    return int(server.add_secure_port(endpoint, credentials))


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    asyncio.run(serve(job))

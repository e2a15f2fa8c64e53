"""How near the parameter server comes to gRPC's own throughput: the same bytes through bare gRPC streams.

torchrun --nproc-per-node 2 benchmarks/grpc_stream.py

Each rank sends a tensor and gets as many bytes back: the sum of all ranks' from the parameter server, and its own from
a server that echoes each message at once, in messages of 1 MB. That server has no arithmetic, no copy and no order
between ranks; it is measured with gRPC's asyncio, which the parameter server uses, and with its threads. All of them
take turns, and a round's time is the slowest rank's.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import grpc
import torch

import trainer
from examples.strategies import STRATEGIES
from examples.strategies.parameter_server.strategy import ParameterServerStrategy
from examples.strategies.parameter_server.wire import CHUNK_BYTES, METHOD, OPTIONS
from trainer.watch.failure import report_failures

SERVERS = ("asyncio", "threads")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--megabytes", type=int, default=25, help="of the tensor (default: %(default)s)")
parser.add_argument("--rounds", type=int, default=15, help="of each way (default: %(default)s)")
parser.add_argument("--serve", choices=SERVERS, help=argparse.SUPPRESS)


async def _return_all(messages: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
    async for message in messages:
        yield message


def _add(server: Any, method: Any) -> int:
    """Have a server answer `METHOD`; return its port."""
    service, name = METHOD.strip("/").split("/")
    handler = grpc.stream_stream_rpc_method_handler(method)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
    return int(server.add_insecure_port("127.0.0.1:0"))


def serve(kind: str) -> None:
    """Print a port and serve on it, until stdin is closed."""

    async def in_asyncio() -> None:
        server = grpc.aio.server(options=OPTIONS)
        port = _add(server, _return_all)
        await server.start()
        print(port, flush=True)
        await asyncio.to_thread(sys.stdin.read)

    def in_threads() -> None:
        server = grpc.server(ThreadPoolExecutor(), options=OPTIONS)
        port = _add(server, lambda messages, _: messages)
        server.start()
        print(port, flush=True)
        sys.stdin.read()

    asyncio.run(in_asyncio()) if kind == "asyncio" else in_threads()


class BareStream:
    """A stream to a server that returns what it gets."""

    def __init__(self, port: int, size: int) -> None:
        self._messages = [bytes(CHUNK_BYTES)] * (size // CHUNK_BYTES)
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._connection = grpc.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS)
        self._answers = self._connection.stream_stream(METHOD)(self._sent())

    def _sent(self) -> Iterator[bytes]:
        while (message := self._outbox.get()) is not None:
            yield message

    def exchange(self) -> None:
        for message in self._messages:
            self._outbox.put(message)
        for _ in self._messages:
            next(self._answers)

    def close(self) -> None:
        self._outbox.put(None)
        self._connection.close()


def open_bare(run: trainer.Run, kind: str, size: int) -> tuple[BareStream, subprocess.Popen[str] | None]:
    """Start a server on rank 0; return this rank's stream to it."""
    process, port = None, 0
    if run.is_root:
        command = [sys.executable, "-m", "benchmarks.grpc_stream", "--serve", kind]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        port = int(process.stdout.readline())
    return BareStream(run.broadcast(port), size), process


def measure(ways: dict[str, Callable[[], object]], run: trainer.Run, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each way's rounds, those of the slowest rank; the first rounds are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 2):
        for name, exchange in ways.items():
            run.barrier()
            started = time.perf_counter()
            exchange()
            seconds[name].append(max(run.all_gather(time.perf_counter() - started)))
    return {name: values[2:] for name, values in seconds.items()}


def main(megabytes: int, rounds: int) -> None:
    run = trainer.init(STRATEGIES["parameter_server"])
    strategy = run.strategy
    assert isinstance(strategy, ParameterServerStrategy)
    size = megabytes * CHUNK_BYTES
    flat = torch.zeros(size // 4)
    opened = {kind: open_bare(run, kind, size) for kind in SERVERS}
    ways: dict[str, Callable[[], object]] = {"parameter server": lambda: strategy.sum_gradients(flat)}
    ways |= {f"gRPC alone, {kind}": stream.exchange for kind, (stream, _) in opened.items()}
    found = measure(ways, run, rounds)
    ours = found["parameter server"]
    run.print(f"| {run.world_size} ranks, {megabytes} MB | MB/s each way of a rank | the parameter server's / this |")
    run.print("|---|---|---|")
    for name, values in found.items():
        rates = [size / 1e6 / value for value in values]
        ratios = [own / other for own, other in zip(values, ours, strict=True)]
        each = f"{statistics.median(rates):,.0f} ({min(rates):,.0f} – {max(rates):,.0f})"
        run.print(f"| {name} | {each} | {statistics.median(ratios):.2f} ({min(ratios):.2f} – {max(ratios):.2f}) |")
    for stream, process in opened.values():
        stream.close()
        if process is not None:
            process.communicate()
    run.close()


if __name__ == "__main__":
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
    else:
        report_failures()
        main(args.megabytes, args.rounds)

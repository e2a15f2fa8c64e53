"""The program of the second call: listens, and gets bytes from the same program on other hosts."""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from typing import Any

LONGEST_S = 120
"""A program whose connection hangs ends by itself after that."""
PROOF_BYTES, PROOF_S, _PROVEN_S = 32, 10.0, 10.0
LARGE_BYTES, MOST_BYTES = 256 * 1024, 4 * 1024 * 1024
# As jobs take them: given by the kernel (Gloo, NCCL, Open MPI's daemons), as `trainer run --torchrun` chooses its own,
# and the first free one from 1024 up, as Open MPI's ranks do (btl_tcp_port_min_v4).
CHOSEN_PORTS, FIRST_PORTS = range(20000, 32000), range(1024, 1424)
ERRORS = OSError, EOFError, asyncio.TimeoutError


async def main(addresses: list[str], token: str) -> None:
    """Listen, print the ports, try the ports of other hosts that are then read, print how that went.

    It goes on listening for the others until its input ends.
    """
    ports = {address: await listen(address, token) for address in addresses}
    print(json.dumps({"answer": ports}), flush=True)
    wait = asyncio.get_running_loop().run_in_executor
    line = await wait(None, sys.stdin.buffer.readline)
    if line:
        print(json.dumps({"answer": await try_all(token=token, **json.loads(line))}), flush=True)
        await wait(None, sys.stdin.buffer.read)
    os._exit(0)  # waits for nobody


async def listen(address: str, token: str) -> list[int]:
    """Listen on three ports of this address as jobs take them; return the ports."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(*ERRORS):
            await serve(reader, writer, token)
        writer.close()

    ports: list[int] = []
    for candidates in ((), random.sample(CHOSEN_PORTS, 20), FIRST_PORTS):
        for port in (*candidates, 0):  # 0: where none is free, one that the kernel gives
            try:
                server = await asyncio.start_server(answer, address, port)
            except OSError:
                if not port:
                    raise
                continue
            ports.append(server.sockets[0].getsockname()[1])
            break
    return ports


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> None:
    """Send as many bytes as are asked for, to who answers a random challenge with its HMAC-SHA256 under the token."""
    challenge = os.urandom(PROOF_BYTES)
    writer.write(challenge)
    proof = await asyncio.wait_for(reader.readexactly(PROOF_BYTES), PROOF_S)
    if not hmac.compare_digest(proof, hmac.digest(token.encode(), challenge, "sha256")):
        return
    while True:
        size = int.from_bytes(await asyncio.wait_for(reader.readexactly(8), _PROVEN_S), "big")
        if size > MOST_BYTES:
            return
        writer.write(bytes(size))
        await writer.drain()


async def try_all(
    token: str, targets: dict[str, Any], wait_s: float, bandwidth_s: float, all_s: float
) -> dict[str, Any]:
    """Get bytes from the programs on other hosts, first from all at once, then for the bandwidth one by one.

    Args:
        targets: address and ports by the host's name, in another order for each host, so that at any time every host
            sends to one and receives from one.
        wait_s: seconds after which an answer is not waited for any more.
        bandwidth_s: seconds for each bandwidth.
        all_s: seconds after which no other bandwidth is measured.

    Returns:
        by the host's name: "address"; "errors" by port, empty for a port that answers; and "bytes_per_s" that come from
        there, or "large_error", where a larger message does not.
    """

    async def attempt(address: str, port: int, size: int, seconds: float) -> tuple[str, float]:
        try:
            return "", await receive(address, port, token, size, seconds, wait_s)
        except ERRORS as error:
            number = getattr(error, "errno", None)
            closed = "timed out" if isinstance(error, asyncio.TimeoutError) else "the connection was closed"
            return os.strerror(number).lower() if number else closed, 0.0

    until, pairs = time.monotonic() + all_s, {}
    ends = [(address, port) for address, ports in targets.values() for port in ports]
    errors = dict(zip(ends, await asyncio.gather(*(attempt(*end, 1, 0.0) for end in ends))))
    for name, (address, ports) in targets.items():
        pair = {"address": address, "errors": {str(port): errors[address, port][0] for port in ports}}
        if not any(pair["errors"].values()) and time.monotonic() < until:
            error, rate = await attempt(address, ports[0], LARGE_BYTES, bandwidth_s)
            pair.update({"large_error": error} if error else {"bytes_per_s": rate})
        pairs[name] = pair
    return pairs


async def receive(address: str, port: int, token: str, size: int, seconds: float, wait_s: float) -> float:
    """Get a message of that size, and larger ones until these seconds are over; return the bytes per second."""
    connecting = asyncio.open_connection(address, port, limit=MOST_BYTES)
    reader, writer = await asyncio.wait_for(connecting, wait_s)
    try:
        challenge = await asyncio.wait_for(reader.readexactly(PROOF_BYTES), wait_s)
        writer.write(hmac.digest(token.encode(), challenge, "sha256"))
        received, started = 0, time.perf_counter()
        while True:
            writer.write(size.to_bytes(8, "big"))
            received += len(await asyncio.wait_for(reader.readexactly(size), wait_s))
            passed, size = time.perf_counter() - started, min(2 * size, MOST_BYTES)
            if passed >= seconds:
                return received / passed
    finally:
        writer.close()


if __name__ == "__main__":
    signal.alarm(LONGEST_S)
    asyncio.run(main(**json.loads(sys.stdin.buffer.readline())))

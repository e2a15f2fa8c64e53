"""The program of a rank of a small all-reduce, which runs with a job's own Python and PyTorch.

Rank 0 answers with the port of its store, then every rank with what it has measured.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_ELEMENTS = {"nccl": 16 * 1024 * 1024, "gloo": 256 * 1024}
_REPEATS = 10


def main() -> None:
    """Join the other rank, sum, and say how long it took."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # where NCCL prints its warnings
    asked = json.loads(sys.stdin.buffer.readline())
    backend, rank, size, limit = asked["backend"], asked["rank"], asked["size"], timedelta(seconds=asked["limit_s"])
    signal.alarm(int(asked["limit_s"]) + 1)
    os.environ.update({"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "NCCL_DEBUG": "WARN"})
    os.environ.pop("NCCL_DEBUG_FILE", None)
    if asked["interface"]:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={asked['interface']}")
    make_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    if rank:
        store = make_store(asked["address"], json.loads(sys.stdin.buffer.readline()), size, False, limit)
    else:  # on this address alone
        server = socket.create_server((asked["address"], 0))
        port, listening = server.getsockname()[1], {"wait_for_workers": False, "master_listen_fd": server.detach()}
        store = make_store(asked["address"], port, size, True, limit, **listening)
        print(json.dumps({"answer": port}), file=answers, flush=True)
    connection = threading.Thread(target=_end_with_input, daemon=True)
    connection.start()
    device = torch.device("cuda", asked["gpu"]) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    print(json.dumps({"answer": _measure(_ELEMENTS[backend], device, rank, size)}), file=answers, flush=True)
    connection.join()  # the other rank may still be summing


def _measure(count: int, device: torch.device, rank: int, size: int) -> dict[str, float]:
    """Return the bytes, the seconds of an all-reduce, its bus bandwidth as nccl-tests define it, and the wrong values.

    Small whole numbers, so that the sums of one or two ranks are exact in float32: each all-reduce in place multiplies
    them by `size`.
    """
    start = torch.arange(count, device=device, dtype=torch.float32) % 1000
    values = start + rank
    dist.all_reduce(values)  # connects the ranks
    float(values[0])  # waits for it, and below for the others
    started = time.perf_counter()
    for _ in range(_REPEATS):
        dist.all_reduce(values)
    float(values[0])
    seconds = (time.perf_counter() - started) / _REPEATS
    sums = (start * size + size * (size - 1) / 2) * float(size) ** _REPEATS
    wrong = (values != sums).sum()
    dist.all_reduce(wrong)
    rate = 4 * count / seconds * 2 * (size - 1) / size
    return {"bytes": 4 * count, "seconds": seconds, "bus_bytes_per_s": rate, "wrong": int(wrong)}


def _end_with_input() -> None:
    """End when the connection has."""
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()

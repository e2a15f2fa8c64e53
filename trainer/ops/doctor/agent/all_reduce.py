"""The program of a rank of a small all-reduce, which runs with a job's own Python and PyTorch.

Rank 0 answers with the port of its store, then every rank with what it has measured: the bytes, the seconds of one
all-reduce, its bus bandwidth as nccl-tests define it, and how many values of all ranks were wrong.
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
from typing import IO, Any

import torch
import torch.distributed as dist

_ELEMENTS = {"nccl": 16 * 1024 * 1024, "gloo": 256 * 1024}
_MEASURED_S = 0.5
_MOST_REPEATS, _WARM_UPS = 50, 2


def main() -> None:
    """Join the other rank, sum, and say how long it took."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # where NCCL prints its warnings
    asked = json.loads(sys.stdin.buffer.readline())
    backend, rank, size, limit_s = asked["backend"], asked["rank"], asked["size"], asked["limit_s"]
    signal.alarm(int(limit_s) + 1)
    os.environ.update({"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "NCCL_DEBUG": "WARN"})
    os.environ.pop("NCCL_DEBUG_FILE", None)
    if asked["interface"]:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={asked['interface']}")
    store = _store(answers, asked["address"], rank, size, timedelta(seconds=limit_s))
    connection = threading.Thread(target=_end_with_input, daemon=True)
    connection.start()
    device = torch.device("cuda", asked["gpu"]) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=limit_s))
    _answer(answers, _measure_sums(backend, device, rank, size))
    connection.join()  # the other rank may still be summing


def _answer(answers: IO[str], value: object) -> None:
    print(json.dumps({"answer": value}), file=answers, flush=True)


def _store(answers: IO[str], address: str, rank: int, size: int, timeout: timedelta) -> Any:
    """Return the store in which the ranks find each other: rank 0's, on this address alone."""
    make_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    if rank:
        port = json.loads(sys.stdin.buffer.readline())
        return make_store(address, port, size, is_master=False, timeout=timeout)
    server = socket.create_server((address, 0))
    port = server.getsockname()[1]
    store = make_store(
        address, port, size, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=server.detach()
    )
    _answer(answers, port)
    return store


def _measure_sums(backend: str, device: torch.device, rank: int, size: int) -> dict[str, object]:
    # Small whole numbers, so that their sums are exact in float32: each all-reduce in place multiplies them by `size`.
    start = torch.arange(_ELEMENTS[backend], device=device, dtype=torch.float32) % 1000
    values = start + rank
    _measure(values, 1)  # connects the ranks
    seconds = _measure(values, _WARM_UPS)
    repeats = torch.tensor([min(_MOST_REPEATS, max(1, int(_MEASURED_S / seconds)))], device=device)
    dist.broadcast(repeats, src=0)
    seconds = _measure(values, int(repeats))
    sums = (start * size + size * (size - 1) / 2) * float(size) ** (_WARM_UPS + int(repeats))
    wrong = torch.tensor([int((values != sums).sum())], device=device)
    dist.all_reduce(wrong)
    length = values.numel() * values.element_size()
    return {
        "bytes": length,
        "seconds": seconds,
        "bus_bytes_per_s": length / seconds * 2 * (size - 1) / size,
        "wrong": int(wrong),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


def _measure(values: torch.Tensor, repeats: int) -> float:
    """Return the seconds of one of `repeats` all-reduces in place."""
    _synchronize(values)
    started = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(values)
    _synchronize(values)
    return (time.perf_counter() - started) / repeats


def _synchronize(values: torch.Tensor) -> None:
    if values.is_cuda:
        torch.cuda.synchronize()


def _end_with_input() -> None:
    """End when the connection has."""
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()

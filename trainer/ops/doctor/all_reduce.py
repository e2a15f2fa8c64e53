"""A small all-reduce, which agents run with a job's own Python by this file's text. It imports nothing of ours.

    python -c TEXT BACKEND RANK SIZE PLACE STORE LIMIT-S

PLACE is the rank's place on its host, and so its GPU. Rank 0 prints one line, a JSON object: the bytes, the seconds of
one all-reduce, its bus bandwidth as nccl-tests define it, and how many values of all ranks were wrong.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

_ELEMENTS = {"nccl": 16 * 1024 * 1024, "gloo": 256 * 1024}
_MEASURED_S = 0.5
_MOST_REPEATS, _WARM_UPS = 50, 2


def main() -> None:
    """Join the other rank, sum, and say how long it took."""
    backend, rank, size, place, store, limit_s = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5], int(sys.argv[6])
    signal.alarm(limit_s)
    threading.Thread(target=_end_with_input, daemon=True).start()
    device = torch.device("cuda", place) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=limit_s)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=timeout)
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
    result = {
        "bytes": length,
        "seconds": seconds,
        "bus_bytes_per_s": length / seconds * 2 * (size - 1) / size,
        "wrong": int(wrong),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }
    if rank == 0:
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


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
    """End when the agent has."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()

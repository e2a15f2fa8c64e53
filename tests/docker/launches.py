"""A script that calls `trainer.launch` on nodes a and b: `python launches.py LAUNCHER returns|raises|dies|waits`."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import trainer

STARTED = "/tmp/launches-started"  # noqa: S108 (in the containers)


def call(what: str) -> tuple[int, str, float]:
    """Sum the ranks; then do to the last rank, which is on node b, what the test wants."""
    run = trainer.init(device="cpu")
    total = run.all_reduce(float(run.rank), "sum").item()
    if run.rank == run.world_size - 1:
        if what == "raises":
            raise FileNotFoundError("there is no such file here")
        if what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
    if what != "returns":
        Path(f"{STARTED}-{run.rank}").touch()
        run.all_reduce(1.0)
        time.sleep(100)
    return run.rank, socket.gethostname(), total


if __name__ == "__main__":
    results = trainer.launch(call, sys.argv[2], np=4, hosts="a:2,b:2", launcher=sys.argv[1])
    print(*results, sep="\n")

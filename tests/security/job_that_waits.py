"""A job that shows its ports: it says that it is ready on every rank, and waits.

`python job_that_waits.py STRATEGY` or `elastic`. It goes on when the file that WAIT_FOR names exists.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any


def wait() -> None:
    """Say that this rank is ready, and wait."""
    print("ready", flush=True)
    while not Path(os.environ["WAIT_FOR"]).exists():
        time.sleep(0.05)


def wait_elastically() -> None:
    """Wait within Horovod's elastic loop, for which a rank opens a port of its own."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    model = torch.nn.Linear(1, 1)

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(_: Any) -> None:
        wait()

    train(hvd.elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1)))


def wait_in_training(strategy: str) -> None:
    """Wait after one update."""
    import torch

    import trainer

    run = trainer.init(strategy=strategy)
    model = torch.nn.Linear(2, 1)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    print(f"interface of Gloo: {os.environ.get('GLOO_SOCKET_IFNAME')}.", flush=True)
    wait()
    run.barrier()


if __name__ == "__main__":
    if sys.argv[1] == "elastic":
        wait_elastically()
    else:
        wait_in_training(sys.argv[1])
